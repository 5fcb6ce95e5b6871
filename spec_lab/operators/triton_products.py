"""kernels=triton computes forwards of up to 16 rows with `spec_kernels`, in six launches per layer of a Llama.

One of the six merges the splits of attention, if keys are split. Norms of heads take a seventh (Qwen3). In layers of
`triton_rows_are_invariant`, a row's result then does not depend, bit for bit, on the number of rows. With 17 to 64
rows, our products are used where they were faster than the library's: in MLPs, and for large weights outside attention
(`_replaced` has exceptions). More rows are left to the library, since arithmetic rather than bytes is then the bound.
All this is for row_invariant=true.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from spec_kernels.early import early_launches
from spec_kernels.product_tiles import INVARIANT_ROWS, MAX_ROWS
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.core.passes import Pass
from spec_lab.core.prompts import NO_ROUNDING
from spec_lab.models.clusters import TokenClusters
from spec_lab.models.draft_parts import (
    DraftInput,
    DraftInputs,
    Likeliest,
    LikeliestToken,
    RecurrentKernels,
    RecurrentParts,
)
from spec_lab.models.experts import ExpertMLP
from spec_lab.models.layer_stack import Layer, LayerStack, Stack
from spec_lab.models.layers import AddPart, DecoderLayer, LayerParts
from spec_lab.models.linear import Linear
from spec_lab.models.norms import RowsPart, WeightedNorm
from spec_lab.models.products import recurrent_by_parts
from spec_lab.models.sandwich import (
    CapLogits,
    EmbedPerLayer,
    LogitCap,
    NormedLinear,
    PerLayerEmbedding,
    Sandwich,
    SandwichParts,
)
from spec_lab.operators.promises import has_dense_mlp, triton_rows_are_invariant
from spec_lab.operators.prompt_rounding import PROMPTS_ALIKE, are_few
from spec_lab.operators.triton_drafting import FusedDraftInput, FusedLikeliest, TritonClusters
from spec_lab.operators.triton_experts import AddExperts, ResidualExperts, fits_few_rows
from spec_lab.operators.triton_linear import (
    AddMLP,
    AddProduct,
    SkinnyLinear,
    SkinnyMLP,
    SkinnyProduct,
    TritonAddThenNorm,
    TritonNorm,
    dense,
)
from spec_lab.operators.triton_mixers import SkinnyQuery, few_rows_mixer
from spec_lab.operators.triton_sandwich import TritonLogitCap, TritonPerLayerEmbedding, triton_sandwich

AddHalf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class TwoWays:
    """A layer with two implementations. For few rows, products apply the norms to their input. For many rows there are
    the library's products, with kernels between them. The MLP's products are ours up to 64 rows.

    Attributes:
        max_rows: the largest number of rows that counts as few. The rows that enter the layer are counted, so that
            results do not depend on rows being dropped inside it.
    """

    few: DecoderLayer
    many: DecoderLayer
    max_rows: int

    @property
    def mixer(self) -> object:
        return self.many.mixer

    @property
    def experts(self) -> ExpertMLP | None:
        return self.many.experts

    def __call__(self, stream: torch.Tensor, at: Pass, rows: torch.Tensor | None = None) -> torch.Tensor:
        way = self.few if are_few(stream, self.max_rows) else self.many
        return way(stream, at, rows)


class TritonProducts:
    """Makes the parts of models that run in Triton, for rows in 16 bits.

    Without row invariance the library makes the products of attention and MLPs, and its rounding depends on the number
    of rows. The kernels between the products are the same.
    """

    def __init__(self, row_invariant: bool = True) -> None:
        self.invariant_rows = self._few = INVARIANT_ROWS if row_invariant else 0
        self._max_rows = MAX_ROWS if row_invariant else 0
        self.prompt_rounding = PROMPTS_ALIKE if row_invariant else NO_ROUNDING

    def is_row_invariant(self, plan: LayerPlan) -> bool:
        return self._max_rows > 0 and triton_rows_are_invariant(plan)

    def launching(self) -> AbstractContextManager[None]:
        return early_launches()

    def norm(self, norm: WeightedNorm) -> RowsPart:
        return TritonNorm.of(norm)

    def linear(self, linear: Linear) -> Linear:
        return SkinnyLinear(dense(linear), self._max_rows)

    def layer(self, parts: LayerParts, plan: LayerPlan) -> Layer:
        layer: Layer
        if not self._fits(plan):
            layer = DecoderLayer.of(parts)
        else:
            few = self._few_rows(parts, plan)
            layer = TwoWays(few, self._many_rows(self._replaced(parts), plan), self._few)
        if parts.experts is not None:
            self._replace_shared_expert(parts.experts)
        return layer

    def stack(self, stack: LayerStack, plans: Sequence[LayerPlan]) -> Stack:
        return stack

    def recurrent(self, parts: RecurrentParts, plan: LayerPlan) -> RecurrentKernels:
        return recurrent_by_parts(self, parts, plan)

    def _fits(self, plan: LayerPlan) -> bool:
        """Return whether the kernels support the layer: one that norms inputs. Latent attention needs row invariance
        and norms that round before the weight is applied."""
        if plan.norms_outputs:
            return False
        return plan.latent is None or (self._max_rows > 0 and not plan.float32_norms)

    def _few_rows(self, parts: LayerParts, plan: LayerPlan) -> DecoderLayer:
        mixer, close = few_rows_mixer(parts, plan), AddProduct(SkinnyProduct(dense(parts.o)))
        return DecoderLayer(None, mixer, close, self._finish(parts, plan), parts.experts)

    def _finish(self, parts: LayerParts, plan: LayerPlan) -> AddHalf:
        """Return the function that norms the stream of few rows and adds a layer's second half to it."""
        norm = parts.mlp_norm
        if parts.dense is not None and has_dense_mlp(plan):
            return AddMLP(parts.dense, INVARIANT_ROWS, norm)
        if parts.experts is not None and parts.experts.sizes.clamp is None and fits_few_rows(parts.experts.sizes):
            return ResidualExperts(parts.experts, norm)
        return AddPart(NormedLinear(TritonNorm.of(norm), parts.mlp))

    def _many_rows(self, parts: LayerParts, plan: LayerPlan) -> DecoderLayer:
        finish: AddHalf = AddPart(parts.mlp)
        if parts.dense is not None and has_dense_mlp(plan):
            finish = AddMLP(parts.dense, self._max_rows)
        elif parts.experts is not None and parts.experts.sizes.clamp is None:
            finish = AddExperts(parts.experts)
        norm = None if parts.norm is None else TritonNorm.of(parts.norm)
        return DecoderLayer(norm, parts.mixer, TritonAddThenNorm(parts.o, parts.mlp_norm), finish, parts.experts)

    def _replaced(self, parts: LayerParts) -> LayerParts:
        """Use our products for up to 64 rows around latent attention, and for e4m3 weights, which the library would
        have to convert."""
        latent, attention = parts.latent, parts.attention
        if latent is not None:
            latent.query = self.linear(latent.query) if latent.narrow is None else SkinnyQuery(latent.narrow)
            latent.row = self.linear(latent.row)
            return replace(parts, o=self.linear(parts.o))
        if attention is None or getattr(attention.qkv, "scales", None) is None:
            return parts
        attention.qkv = self.linear(attention.qkv)
        return replace(parts, o=self.linear(parts.o))

    def _replace_shared_expert(self, experts: ExpertMLP) -> None:
        """Replace the shared expert if it has no gate and rows are invariant."""
        shared = experts.shared
        if self._max_rows and shared is not None and shared.gate is None:
            shared.run = SkinnyMLP(shared.mlp)

    def draft_input(self, part: DraftInput) -> DraftInputs:
        return FusedDraftInput(part)

    def likeliest(self, part: LikeliestToken) -> Likeliest:
        return FusedLikeliest(part, self._max_rows)

    def likeliest_in_clusters(self, part: TokenClusters) -> Likeliest:
        return TritonClusters(part)

    def sandwich(self, parts: SandwichParts) -> Sandwich:
        return triton_sandwich(parts, self._max_rows)

    def per_layer_embedding(self, part: PerLayerEmbedding) -> EmbedPerLayer:
        return TritonPerLayerEmbedding(part, self.linear(part.projection), TritonNorm.of(part.norm))

    def logit_cap(self, part: LogitCap) -> CapLogits:
        return TritonLogitCap(part.cap)
