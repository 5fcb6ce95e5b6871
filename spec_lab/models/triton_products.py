"""kernels=triton computes forwards of up to 64 rows with `spec_kernels`: a decoder layer is then seven launches.

A row of up to 16 does not depend, bit for bit, on how many stand beside it. More than 64 rows go to the library's
products, which arithmetic bounds there and not bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from spec_kernels.draft_input import draft_input
from spec_kernels.likeliest import likeliest
from spec_kernels.norms import rms_norm
from spec_kernels.product import product
from spec_kernels.product_tiles import INVARIANT_ROWS, MAX_ROWS, num_arrivals
from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.protocols import RowSelection
from spec_lab.core.types import AttentionMetadata
from spec_lab.models.experts import ExpertMLP
from spec_lab.models.layers import Attention, DecoderLayer, GatedMLP, RMSNorm, RotaryRows, RowsPart
from spec_lab.models.linear import DenseLinear, Linear
from spec_lab.models.plan import LayerPlan
from spec_lab.models.products import Body, DraftInput, DraftInputs, Layer, LayerBody, Likeliest, LikeliestToken


@dataclass(frozen=True, slots=True)
class TritonNorm:
    """Is an `RMSNorm` in one launch."""

    weight: torch.Tensor
    eps: float

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(rows)
        rms_norm(out, rows, self.weight, self.eps)
        return out


class SkinnyProduct:
    """Is a product of up to 64 rows, with what fuses with it: a norm before it, and after it SiLU and the product with
    the other half of the outputs, or a residual.

    Every program of a fused norm sees all rows: beyond 16 of them a kernel before it costs less.
    """

    __slots__ = ("_arrivals", "_bias", "_eps", "_gated", "_norm", "_norm_weight", "_out_features", "_weight")

    def __init__(self, linear: DenseLinear, norm: RMSNorm | None = None, gated: bool = False) -> None:
        self._weight, self._bias = linear.weight, linear.bias
        self._norm = None if norm is None else TritonNorm(norm.weight, norm.eps)
        self._norm_weight = None if norm is None else norm.weight.float()
        self._eps = 0.0 if norm is None else norm.eps
        self._gated = gated
        self._out_features = linear.weight.shape[0] // (2 if gated else 1)
        self._arrivals = no_arrivals(self._out_features, linear.weight.device)

    def __call__(self, rows: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        out = rows.new_empty(rows.shape[0], self._out_features)
        norm_weight = self._norm_weight
        if self._norm is not None and rows.shape[0] > INVARIANT_ROWS:
            rows, norm_weight = self._norm(rows), None
        parts = self._bias, norm_weight, self._eps, residual, self._gated
        product(out, rows, self._weight, self._arrivals, *parts)
        return out


def no_arrivals(out_features: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(num_arrivals(out_features), dtype=torch.int32, device=device)


class SkinnyLinear:
    """Is a plain product: of few rows by the kernel, of many by the library."""

    __slots__ = ("_few", "_many")

    def __init__(self, linear: DenseLinear) -> None:
        self._few = SkinnyProduct(linear)
        self._many = linear

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._few(rows) if 0 < rows.shape[0] <= MAX_ROWS else self._many(rows)


class FusedMLP:
    """Adds a gated MLP of the normed stream to it, in two kernels."""

    __slots__ = ("_down", "_gate_up")

    def __init__(self, mlp: GatedMLP, norm: RMSNorm) -> None:
        self._gate_up = SkinnyProduct(dense(mlp.gate_up), norm, gated=True)
        self._down = SkinnyProduct(dense(mlp.down))

    def __call__(self, stream: torch.Tensor) -> torch.Tensor:
        return self._down(self._gate_up(stream), stream)


class ResidualPart:
    """Adds a part of the normed stream to it: experts, which have kernels of their own."""

    __slots__ = ("_norm", "_part")

    def __init__(self, part: RowsPart, norm: RowsPart) -> None:
        self._part = part
        self._norm = norm

    def __call__(self, stream: torch.Tensor) -> torch.Tensor:
        return stream + self._part(self._norm(stream))


class FusedBody:
    """Is a `LayerBody`; with `norm` it is a whole layer, whose first norm is inside the first product."""

    __slots__ = ("_attention", "_o", "_plain", "_qkv", "_rows_part")

    def __init__(
        self,
        attention: Attention,
        rows_part: Callable[[torch.Tensor], torch.Tensor],
        norm: RMSNorm | None,
        plain: LayerBody,
    ) -> None:
        """`plain` is for many rows, of which some may be few after they attended."""
        self._attention = attention
        self._qkv = SkinnyProduct(dense(attention.qkv), norm)
        self._o = SkinnyProduct(dense(attention.o))
        self._rows_part = rows_part
        self._plain = plain

    def __call__(
        self,
        rows: torch.Tensor,
        residual: torch.Tensor,
        rotary: RotaryRows,
        cache: LayerCache,
        metadata: AttentionMetadata,
        selection: RowSelection,
    ) -> torch.Tensor:
        if rows.shape[0] > MAX_ROWS:
            return self._plain(rows, residual, rotary, cache, metadata, selection)
        attended = self._attention.attended(self._qkv(rows), rotary, cache, metadata, selection)
        return self._rows_part(self._o(attended, residual))

    def write(self, rows: torch.Tensor, rotary: RotaryRows, cache: LayerCache, metadata: AttentionMetadata) -> None:
        if rows.shape[0] > MAX_ROWS:
            self._plain.write(rows, rotary, cache, metadata)
        else:
            self._attention.write_projected(self._qkv(rows), rotary, cache, metadata)


class FusedLayer:
    """Is a `DecoderLayer` whose forwards of few rows are fused."""

    __slots__ = ("_few", "_many")

    def __init__(self, few: FusedBody, many: DecoderLayer) -> None:
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
        if stream.shape[0] > MAX_ROWS:
            return self._many(stream, rotary, cache, metadata, selection)
        if selection.is_empty:
            self._few.write(stream, rotary, cache, metadata)
            return stream[:0]
        return self._few(stream, selection.residual(stream), rotary, cache, metadata, selection)

    @property
    def attention(self) -> object:
        return self._many.attention

    @property
    def expert_parts(self) -> tuple[ExpertMLP, ...]:
        return self._many.expert_parts


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

    __slots__ = ("_arrivals", "_eps", "_norm_weight", "_plain", "_weight")

    def __init__(self, plain: LikeliestToken, norm: RMSNorm | None) -> None:
        self._plain = plain
        self._weight = dense(plain.head).weight
        self._norm_weight = None if norm is None else norm.weight.float()
        self._eps = 0.0 if norm is None else norm.eps
        self._arrivals = torch.zeros(1, dtype=torch.int32, device=self._weight.device)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[0] > MAX_ROWS:
            return self._plain(hidden)
        tokens = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
        parts = self._norm_weight, self._eps, self._plain.token_map
        likeliest(tokens, hidden, self._weight, self._arrivals, *parts)
        return tokens


class TritonProducts:
    """Keeps the protocol `Products`, for 16-bit weights."""

    def norm(self, norm: RowsPart, plan: LayerPlan) -> RowsPart:
        if plan.float32_norms:
            return norm
        rms = cast(RMSNorm, norm)
        return TritonNorm(rms.weight, rms.eps)

    def linear(self, linear: Linear) -> Linear:
        return SkinnyLinear(dense(linear))

    def layer(self, layer: DecoderLayer, plan: LayerPlan) -> Layer:
        if not fits(plan):
            return layer
        first, second = cast(RMSNorm, layer.attention_norm), cast(RMSNorm, layer.mlp_norm)
        many = DecoderLayer(layer.attention, layer.mlp, self.norm(first, plan), self.norm(second, plan))
        plain = LayerBody(layer.attention, layer.mlp, second)
        return FusedLayer(FusedBody(cast(Attention, layer.attention), self._rows_part(plain, plan), first, plain), many)

    def body(self, body: LayerBody, plan: LayerPlan) -> Body:
        if not fits(plan):
            return body
        return FusedBody(cast(Attention, body.attention), self._rows_part(body, plan), None, body)

    def _rows_part(self, body: LayerBody, plan: LayerPlan) -> Callable[[torch.Tensor], torch.Tensor]:
        if plan.experts is not None or plan.mlp_bias:
            return ResidualPart(body.mlp, self.norm(body.mlp_norm, plan))
        return FusedMLP(cast(GatedMLP, body.mlp), cast(RMSNorm, body.mlp_norm))

    def draft_input(self, part: DraftInput, plan: LayerPlan) -> DraftInputs:
        if plan.float32_norms:
            return part
        return FusedDraftInput(part, cast(RMSNorm, part.embedding_norm), cast(RMSNorm, part.hidden_norm))

    def likeliest(self, part: LikeliestToken, plan: LayerPlan) -> Likeliest:
        if plan.float32_norms and part.norm is not None:
            return part
        return FusedLikeliest(part, cast("RMSNorm | None", part.norm))


def fits(plan: LayerPlan) -> bool:
    """Tell whether a layer has grouped-query attention between two plain norms, and no gate behind it."""
    is_other = plan.delta_net is not None or plan.latent is not None
    return not (is_other or plan.attention_gate or plan.float32_norms)


def dense(linear: Linear) -> DenseLinear:
    """Return a product whose weight lies as the kernels read it; on a GPU each does."""
    assert hasattr(linear, "weight"), "a packed or split product has no kernel"
    return cast(DenseLinear, linear)
