"""kernels=triton computes forwards of up to 16 rows with `spec_kernels`: a decoder layer is then six launches.

Norms of heads take a seventh (Qwen3). A row of those does not depend, bit for bit, on how many stand beside it. Up to
64 rows the large products are ours too, and the small ones the library's, each where it was faster. More rows go to the
library, since arithmetic bounds them there and not bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any, cast

import torch

from spec_kernels.clusters import likeliest_in_clusters
from spec_kernels.draft_input import draft_input
from spec_kernels.early import early_launches
from spec_kernels.likeliest import likeliest
from spec_kernels.norms import add_rms_norm
from spec_kernels.product_tiles import INVARIANT_ROWS, MAX_ROWS
from spec_lab.core.conditional import is_inside_if_node
from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.protocols import RowSelection
from spec_lab.core.types import AttentionMetadata
from spec_lab.models.clusters import TokenClusters
from spec_lab.models.experts import ExpertMLP
from spec_lab.models.layers import Attention, AttentionPart, DecoderLayer, GatedMLP, RowsPart
from spec_lab.models.linear import Linear
from spec_lab.models.norms import RMSNorm, WeightedNorm
from spec_lab.models.plan import LayerPlan
from spec_lab.models.products import Body, DraftInput, DraftInputs, Layer, LayerBody, Likeliest, LikeliestToken
from spec_lab.models.residual_experts import FinishWithExperts, ResidualExperts, fits_few_rows
from spec_lab.models.rope import RotaryRows
from spec_lab.models.sandwich import CapLogits, EmbedPerLayer, LogitCap, PerLayerEmbedding, SandwichParts
from spec_lab.models.triton_heads import FewRowsAttention, few_rows_attention
from spec_lab.models.triton_linear import SkinnyLinear, SkinnyProduct, TritonGatedMLP, TritonNorm, dense
from spec_lab.models.triton_sandwich import TritonLogitCap, TritonPerLayerEmbedding, triton_sandwich


class FusedMLP:
    """Adds a gated MLP of the normed stream to it, in two kernels."""

    __slots__ = ("_down", "_gate_up")

    def __init__(self, mlp: GatedMLP, norm: RMSNorm) -> None:
        self._gate_up = SkinnyProduct(dense(mlp.gate_up), norm, gated=True)
        self._down = SkinnyProduct(dense(mlp.down))

    def __call__(self, stream: torch.Tensor) -> torch.Tensor:
        return self._down(self._gate_up(stream), stream)


class ResidualPart:
    """Adds a part of the normed stream to it: an MLP with biases, or experts that others choose."""

    __slots__ = ("_norm", "_part")

    def __init__(self, part: RowsPart, norm: RowsPart) -> None:
        self._part = part
        self._norm = norm

    def __call__(self, stream: torch.Tensor) -> torch.Tensor:
        return stream + self._part(self._norm(stream))


Finish = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Turns the residual stream and its norm into the stream behind a layer's second half, and may do so in place."""


class FinishWithMLP:
    """Adds the gated MLP of a norm to the stream: by our products up to `max_rows`, and else by the library's."""

    __slots__ = ("_down", "_gate_up", "_many", "_max_rows")

    def __init__(self, mlp: GatedMLP, max_rows: int) -> None:
        self._gate_up = SkinnyProduct(dense(mlp.gate_up), gated=True)
        self._down = SkinnyProduct(dense(mlp.down))
        self._many = TritonGatedMLP.of(mlp)
        self._max_rows = max_rows

    def __call__(self, stream: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        if 0 < stream.shape[0] <= self._max_rows:
            return self._down(self._gate_up(normed), stream)
        return self._many.add_to(stream, normed)


@dataclass(frozen=True, slots=True)
class FinishWithPart:
    """Adds a part of a norm to the stream: an MLP with biases."""

    part: RowsPart

    def __call__(self, stream: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        return stream + self.part(normed)


@dataclass(slots=True)
class ManyRowsBody:
    """Is a `LayerBody` of more than 16 rows: attention with the library's products, and kernels between them."""

    attention: AttentionPart[LayerCache]
    mlp_norm: RMSNorm
    finish: Finish

    def __call__(
        self,
        rows: torch.Tensor,
        residual: torch.Tensor,
        rotary: RotaryRows,
        cache: LayerCache,
        metadata: AttentionMetadata,
        selection: RowSelection,
    ) -> torch.Tensor:
        added = self.attention(rows, rotary, cache, metadata, selection)
        stream, normed = torch.empty_like(added), torch.empty_like(added)
        add_rms_norm(normed, stream, residual, added, self.mlp_norm.weight, self.mlp_norm.eps)
        return self.finish(stream, normed)

    def write(self, rows: torch.Tensor, rotary: RotaryRows, cache: LayerCache, metadata: AttentionMetadata) -> None:
        self.attention.write(rows, rotary, cache, metadata)


class FusedBody:
    """Is a `LayerBody`; with `norm` it is a whole layer, whose first norm is inside the first product."""

    __slots__ = ("_attention", "_many", "_max_rows", "_o", "_rows_part")

    def __init__(
        self,
        attention: FewRowsAttention,
        o: Linear,
        rows_part: Callable[[torch.Tensor], torch.Tensor],
        many: ManyRowsBody,
        max_rows: int,
    ) -> None:
        """`many`, for more than `max_rows`, takes rows that have been normed."""
        self._attention = attention
        self._o = SkinnyProduct(dense(o))
        self._rows_part = rows_part
        self._many = many
        self._max_rows = max_rows

    def __call__(
        self,
        rows: torch.Tensor,
        residual: torch.Tensor,
        rotary: RotaryRows,
        cache: LayerCache,
        metadata: AttentionMetadata,
        selection: RowSelection,
    ) -> torch.Tensor:
        if rows.shape[0] > self._max_rows:
            return self._many(rows, residual, rotary, cache, metadata, selection)
        attended = self._attention.attended(rows, rotary, cache, metadata, selection)
        return self._rows_part(self._o(attended, residual))

    def write(self, rows: torch.Tensor, rotary: RotaryRows, cache: LayerCache, metadata: AttentionMetadata) -> None:
        if rows.shape[0] > self._max_rows:
            self._many.write(rows, rotary, cache, metadata)
        else:
            self._attention.write(rows, rotary, cache, metadata)


class FusedLayer:
    """Is a `DecoderLayer`, for which two bodies stand ready: `few` norms in its first product, `many` takes normed
    rows."""

    __slots__ = ("_few", "_many", "_max_rows", "_norm", "_plain")

    def __init__(self, plain: DecoderLayer, norm: RowsPart, few: Body, many: ManyRowsBody, max_rows: int) -> None:
        self._plain = plain
        self._max_rows = max_rows
        self._norm = norm
        self._few = few
        self._many = many

    def __call__(
        self,
        stream: torch.Tensor,
        rotary: RotaryRows,
        cache: Any,
        metadata: AttentionMetadata,
        selection: RowSelection,
    ) -> torch.Tensor:
        body: Body = self._few
        rows = stream
        if stream.shape[0] > self._max_rows:
            body, rows = self._many, self._norm(stream)
        if selection.is_empty:
            body.write(rows, rotary, cache, metadata)
            return stream[:0]
        return body(rows, selection.residual(stream), rotary, cache, metadata, selection)

    @property
    def attention(self) -> object:
        return self._plain.attention

    @property
    def expert_parts(self) -> tuple[ExpertMLP, ...]:
        return self._plain.expert_parts


@dataclass(frozen=True, slots=True)
class FusedDraftInput:
    """Is a `DraftInput` in one kernel."""

    plain: DraftInput
    embedding_norm: RMSNorm
    hidden_norm: RMSNorm

    def __call__(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows, size = hidden.shape
        out = hidden.new_empty(num_rows, 2 * size)
        first, second = self.embedding_norm, self.hidden_norm
        embedding = self.plain.embedding
        draft_input(out, token_ids, embedding, first.weight, first.eps, hidden, second.weight, second.eps)
        return out, out[:, size:]


class FusedLikeliest:
    """Is a `LikeliestToken` in one kernel."""

    __slots__ = ("_arrivals", "_eps", "_max_rows", "_norm_weight", "_plain", "_weight")

    def __init__(self, plain: LikeliestToken, norm: WeightedNorm | None, max_rows: int) -> None:
        self._plain = plain
        self._max_rows = max_rows
        self._weight = dense(plain.head).weight
        self._norm_weight = None if norm is None else norm.kernel_weight.float()
        self._eps = 0.0 if norm is None else norm.eps
        self._arrivals = torch.zeros(1, dtype=torch.int32, device=self._weight.device)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[0] > self._max_rows:
            return self._plain(hidden)
        return self._launch(hidden, None)

    def with_probability(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if hidden.shape[0] > self._max_rows:
            return self._plain.with_probability(hidden)
        probabilities = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        return self._launch(hidden, probabilities), probabilities

    def _launch(self, hidden: torch.Tensor, probabilities: torch.Tensor | None) -> torch.Tensor:
        tokens = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
        parts = self._norm_weight, self._eps, self._plain.token_map
        likeliest(tokens, hidden, self._weight, self._arrivals, *parts, probabilities)
        return tokens


class TritonClusters:
    """Is a `TokenClusters` in a product and two kernels, for up to 64 rows."""

    __slots__ = ("_arrivals", "_plain")

    def __init__(self, plain: TokenClusters) -> None:
        self._plain = plain
        self._arrivals = torch.zeros(MAX_ROWS, dtype=torch.int32, device=plain.rows.device)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        plain, num_rows = self._plain, hidden.shape[0]
        if num_rows > MAX_ROWS:
            return plain(hidden)
        tokens = torch.empty(num_rows, dtype=torch.int64, device=hidden.device)
        clusters = plain.rows, plain.token_ids, self._arrivals, plain.num_chosen
        likeliest_in_clusters(tokens, hidden, plain.centroids(hidden), *clusters)
        return tokens

    def with_probability(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._plain.with_probability(hidden)


class TritonProducts:
    """Keeps the protocol `Products`, for 16-bit weights.

    Without row invariance all products are the library's, whose rounding follows the number of rows; what stands
    between them stays fused.
    """

    invariant_rows = INVARIANT_ROWS

    def __init__(self, row_invariant: bool = True) -> None:
        self._few = INVARIANT_ROWS if row_invariant else 0
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
