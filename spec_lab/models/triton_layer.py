"""A decoder layer under `kernels=triton`: a body for few rows, whose products norm what they read, and one for many.

That one has the library's products, and kernels between them; the MLP's are ours up to 64 rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from spec_kernels.norms import add_rms_norm
from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.layer_protocols import RowSelection
from spec_lab.core.types import AttentionMetadata
from spec_lab.models.experts import ExpertMLP
from spec_lab.models.layers import AttentionPart, DecoderLayer, GatedMLP, RowsPart
from spec_lab.models.linear import Linear
from spec_lab.models.norms import RMSNorm
from spec_lab.models.replaceable_parts import Body
from spec_lab.models.rope import RotaryRows
from spec_lab.models.triton_heads import FewRowsAttention
from spec_lab.models.triton_linear import SkinnyProduct, TritonGatedMLP, dense


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
    """A layer body of more than 16 rows: attention with the library's products, and kernels between them."""

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
    """A layer body of few rows; where `attention` has a norm it is a whole layer, with the norm in its first
    product."""

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
    """A decoder layer for which two bodies stand ready: `few` norms in its first product, `many` takes normed
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
