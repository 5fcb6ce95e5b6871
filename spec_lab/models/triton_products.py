"""kernels=triton computes forwards of up to 16 rows with `spec_kernels`: a decoder layer is then six launches.

Norms of heads take a seventh (Qwen3). A row of those does not depend, bit for bit, on how many stand beside it. Up to
64 rows the large products are ours too, and the small ones the library's, each where it was faster. More rows go to the
library, since arithmetic bounds them there and not bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import cast

import torch

from spec_kernels.early import early_launches
from spec_kernels.product_tiles import INVARIANT_ROWS, MAX_ROWS
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.core.conditional import is_inside_if_node
from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.protocols import DraftStart, DraftSteps
from spec_lab.models.clusters import TokenClusters
from spec_lab.models.experts import ExpertMLP
from spec_lab.models.layers import Attention, AttentionPart, DecoderLayer, GatedMLP, RowsPart
from spec_lab.models.linear import Linear
from spec_lab.models.norms import RMSNorm, WeightedNorm
from spec_lab.models.replaceable_parts import (
    Body,
    DraftInput,
    DraftInputs,
    DraftLayer,
    DraftLayers,
    Layer,
    LayerBody,
    LayerStack,
    Likeliest,
    LikeliestToken,
    Stack,
)
from spec_lab.models.residual_experts import FinishWithExperts, ResidualExperts, fits_few_rows
from spec_lab.models.sandwich import CapLogits, EmbedPerLayer, LogitCap, PerLayerEmbedding, SandwichParts
from spec_lab.models.triton_drafting import FusedDraftInput, FusedLikeliest, TritonClusters
from spec_lab.models.triton_heads import few_rows_attention
from spec_lab.models.triton_layer import (
    Finish,
    FinishWithMLP,
    FinishWithPart,
    FusedBody,
    FusedLayer,
    FusedMLP,
    ManyRowsBody,
    ResidualPart,
)
from spec_lab.models.triton_linear import SkinnyLinear, TritonNorm, dense
from spec_lab.models.triton_sandwich import TritonLogitCap, TritonPerLayerEmbedding, triton_sandwich


class TritonProducts:
    """Makes the parts of models that run in Triton, for 16-bit weights.

    Without row invariance all products are the library's, whose rounding follows the number of rows; what stands
    between them stays fused.
    """

    def __init__(self, row_invariant: bool = True) -> None:
        self.invariant_rows = self._few = INVARIANT_ROWS if row_invariant else 0
        self._max_rows = MAX_ROWS if row_invariant else 0

    def is_row_invariant(self, plan: LayerPlan) -> bool:
        norms_or_gates_in_torch = plan.float32_norms or plan.attention_gate
        return self._max_rows > 0 and fits(plan) and has_dense_mlp(plan) and not norms_or_gates_in_torch

    def launching(self) -> AbstractContextManager[None]:
        return nullcontext() if is_inside_if_node() else early_launches()

    def norm(self, norm: RowsPart) -> RowsPart:
        return TritonNorm.of(cast(WeightedNorm, norm))

    def linear(self, linear: Linear) -> Linear:
        return SkinnyLinear(dense(linear), self._max_rows)

    def layer(self, layer: DecoderLayer, plan: LayerPlan) -> Layer:
        if not fits(plan):
            return layer
        return self.fused_layer(layer, plan)

    def body(self, body: LayerBody, plan: LayerPlan) -> Body:
        return self._few_rows(body, plan, None, self._many_rows(body, plan)) if fits(plan) else body

    def stack(self, stack: LayerStack, plans: Sequence[LayerPlan]) -> Stack:
        return stack

    def draft_layer(self, part: DraftLayer, plan: LayerPlan) -> DraftLayers:
        return part

    def draft_start(self, fuse: Linear, layer: DraftLayers, likeliest: Likeliest, plan: LayerPlan) -> DraftStart | None:
        return None

    def draft_steps(self, layer: DraftLayers, likeliest: Likeliest, plan: LayerPlan) -> DraftSteps | None:
        return None

    def fused_layer(self, layer: DecoderLayer, plan: LayerPlan) -> FusedLayer:
        """Return a layer with a body for few rows and one for many."""
        norm = cast(RMSNorm, layer.attention_norm)
        body = LayerBody(layer.attention, layer.mlp, layer.mlp_norm)
        many = self._many_rows(body, plan)
        return FusedLayer(layer, self.norm(norm), self._few_rows(body, plan, norm, many), many, self._few)

    def _few_rows(self, body: LayerBody, plan: LayerPlan, norm: RMSNorm | None, many: ManyRowsBody) -> Body:
        rows_part = self.rows_part(body.mlp, cast(RMSNorm, body.mlp_norm), plan)
        attention = cast(Attention, body.attention)
        return FusedBody(few_rows_attention(attention, plan, norm), attention.o, rows_part, many, self._few)

    def rows_part(self, mlp: RowsPart, norm: RMSNorm, plan: LayerPlan) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what adds a layer's second half to the stream of a few rows."""
        if has_dense_mlp(plan):
            return FusedMLP(cast(GatedMLP, mlp), norm)
        many_norm = self.norm(norm)
        if plan.experts is not None and fits_few_rows(plan.experts):
            return ResidualExperts(cast(ExpertMLP, mlp), norm, many_norm)
        return ResidualPart(mlp, many_norm)

    def _many_rows(self, body: LayerBody, plan: LayerPlan) -> ManyRowsBody:
        finish: Finish = FinishWithPart(body.mlp)
        if has_dense_mlp(plan):
            finish = FinishWithMLP(cast(GatedMLP, body.mlp), self._max_rows)
        elif plan.experts is not None:
            finish = FinishWithExperts(cast(ExpertMLP, body.mlp))
        attention = body.attention if plan.latent is not None else self._many_rows_attention(body.attention)
        return ManyRowsBody(attention, cast(RMSNorm, body.mlp_norm), finish)

    def _many_rows_attention(self, part: AttentionPart[LayerCache]) -> AttentionPart[LayerCache]:
        """Take our products up to 64 rows where the library's would have to widen every weight for them."""
        attention = cast(Attention, part)
        if getattr(attention.qkv, "scales", None) is None:
            return part
        ours = copy(attention)
        ours.qkv, ours.o = (SkinnyLinear(dense(linear), self._max_rows) for linear in (attention.qkv, attention.o))
        return ours

    def draft_input(self, part: DraftInput) -> DraftInputs:
        return FusedDraftInput(part, cast(RMSNorm, part.embedding_norm), cast(RMSNorm, part.hidden_norm))

    def likeliest(self, part: LikeliestToken) -> Likeliest:
        return FusedLikeliest(part, cast("WeightedNorm | None", part.norm), self._max_rows)

    def likeliest_in_clusters(self, part: TokenClusters) -> Likeliest:
        return TritonClusters(part)

    def sandwich(self, parts: SandwichParts) -> SandwichParts:
        return triton_sandwich(parts, self._max_rows)

    def per_layer_embedding(self, part: EmbedPerLayer) -> EmbedPerLayer:
        plain = cast(PerLayerEmbedding, part)
        return TritonPerLayerEmbedding.of(plain, self.linear(plain.projection))

    def logit_cap(self, part: CapLogits) -> CapLogits:
        return TritonLogitCap(cast(LogitCap, part).cap)


def fits(plan: LayerPlan) -> bool:
    """Tell whether a layer is two products around what mixes rows, and an MLP or experts: latent attention is not."""
    return plan.latent is None


def has_dense_mlp(plan: LayerPlan) -> bool:
    """Tell whether a layer ends in an MLP of two products without biases."""
    return plan.experts is None and not plan.mlp_bias
