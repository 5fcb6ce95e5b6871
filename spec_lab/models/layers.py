"""The parts of a decoder layer, for targets and draft heads: RoPE with the KV write, attention, residuals and norms.

Projections of the same rows are fused (q, k and v; gate and up). Everything works on flat rows [batch * num_queries,
width].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.core.layer_protocols import AttentionBackend, RopeWrite
from spec_lab.core.passes import Pass
from spec_lab.core.ragged import attend
from spec_lab.models.linear import Linear
from spec_lab.models.norms import RowsPart, WeightedNorm


class RopeAndWrite(Protocol):
    """Rotates projected heads, writes their K and V to the cache if there are any, and returns the queries."""

    def __call__(self, heads: torch.Tensor, at: Pass) -> torch.Tensor:
        """Return rotated queries [rows, num_heads, head_dim]; `heads` [rows, heads, head_dim] begins with the query
        heads."""
        ...


@dataclass(frozen=True, slots=True)
class RopeThenWrite:
    """Norms (if there is a norm), rotates and writes KV as separate steps, for heads of every size."""

    num_heads: int
    num_kv_heads: int
    backend: AttentionBackend
    qk_norm: RowsPart | None = None

    def __call__(self, heads: torch.Tensor, at: Pass) -> torch.Tensor:
        num_qk_heads = self.num_heads + self.num_kv_heads
        qk, values = heads[:, :num_qk_heads], heads[:, num_qk_heads : num_qk_heads + self.num_kv_heads]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = at.rotary(qk)
        self.backend.write(at.cache, at.metadata, qk[:, self.num_heads :], values)
        return qk[:, : self.num_heads]


@dataclass(frozen=True, slots=True)
class FusedRopeAndWrite:
    """Runs one kernel, which norms (if there is a norm), rotates, and writes KV if there are KV heads.

    Attributes:
        norm_weight: [num_heads + num_kv_heads, head_dim]; float32 if the norm rounds only after it multiplies by the
            weight. None without a norm.
        norms_values: values are normed as well, without a weight.
    """

    num_heads: int
    num_kv_heads: int
    rope_write: RopeWrite
    norm_weight: torch.Tensor | None = None
    eps: float = 0.0
    norms_values: bool = False

    def __call__(self, heads: torch.Tensor, at: Pass) -> torch.Tensor:
        kv, powers = (at.cache.kv, at.cache.powers) if self.num_kv_heads else (None, None)
        read = heads[:, : self.num_heads + 2 * self.num_kv_heads]
        places = *at.rotary.flat, at.metadata.slot_mapping
        norm = self.norm_weight, self.eps, self.norms_values
        return self.rope_write(self.num_heads, kv, read, *places, *norm, powers)


@dataclass(slots=True)
class Attention:
    """Grouped-query attention over the paged cache.

    Gated attention (Qwen3-Next, Qwen3.5) multiplies each head's output by the sigmoid of a gate. The gates are
    `num_heads` more heads at the end of the `qkv` product.

    Attributes:
        qkv: the product for queries, keys and values; it may include the layer's first norm.
        scale: of attention scores.
        sinks: [num_heads] float32, the learned score of a key without a value (gpt-oss); None without one.
    """

    qkv: RowsPart
    o: Linear
    num_heads: int
    head_dim: int
    scale: float
    rope_and_write: RopeAndWrite
    backend: AttentionBackend
    window: int | None = None
    gated: bool = False
    sinks: torch.Tensor | None = None

    def __call__(self, rows: torch.Tensor, at: Pass) -> torch.Tensor:
        """Write the KV of all rows, attend, and return the input of `o` for the kept rows; there must be at least
        one."""
        return self.attended(self.qkv(rows), at)

    def attended(self, projected: torch.Tensor, at: Pass) -> torch.Tensor:
        """Compute everything between the products: from the output of `qkv` to the input of `o`."""
        heads = projected.unflatten(-1, (-1, self.head_dim))
        out = self.mixed(self.rope_and_write(heads, at), at)
        if self.gated:
            out = out * torch.sigmoid(at.kept.residual(heads[:, -self.num_heads :].flatten(1)))
        return out

    def mixed(self, queries: torch.Tensor, at: Pass) -> torch.Tensor:
        """Attend with rotated queries [rows, num_heads, head_dim] over the cache, and return [kept rows, width]."""
        queries, metadata = at.kept.queries(queries, at.metadata)
        out = attend(self.backend, queries, at.cache, metadata, self.window, self.scale, self.sinks)
        return at.kept.attended(out)

    def write(self, rows: torch.Tensor, at: Pass) -> None:
        """Only write the KV of all rows, for a layer whose output is not read."""
        self.write_projected(self.qkv(rows), at)

    def write_projected(self, projected: torch.Tensor, at: Pass) -> None:
        """Only write the KV, from the output of `qkv`."""
        self.rope_and_write(projected.unflatten(-1, (-1, self.head_dim)), at)


class Mixer(Protocol):
    """The part of a layer that mixes the rows of a request, with a cache of pages or states."""

    def __call__(self, rows: torch.Tensor, at: Pass) -> torch.Tensor:
        """Update the cache with all rows, and return the kept rows [kept rows, width] before the output product."""
        ...

    def write(self, rows: torch.Tensor, at: Pass) -> None:
        """Only update the cache with all rows."""
        ...


@dataclass(slots=True)
class AddThenNorm:
    """Ends the first half of a layer: adds its output to the residual stream, and norms the input of the second
    half."""

    product: Linear
    norm: WeightedNorm

    def __call__(self, mixed: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual stream [rows, hidden_size], and the normed input of the second half."""
        stream = residual + self.product(mixed)
        return stream, self.norm(stream)


@dataclass(slots=True)
class AddPart:
    """Adds the output of a part, such as the MLP, to the residual stream."""

    part: RowsPart

    def __call__(self, stream: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return stream + self.part(rows)


@dataclass(slots=True)
class AddNormedPart:
    """Adds the normed output of a part to the residual stream, in a layer that norms outputs rather than inputs."""

    part: RowsPart
    norm: RowsPart

    def __call__(self, stream: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return stream + self.norm(self.part(rows))

    def close(self, mixed: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """End the first half of the layer: the second half reads the stream as it is."""
        stream = self(residual, mixed)
        return stream, stream


@dataclass(slots=True)
class DecoderLayer:
    """A pre-norm residual block. All rows update the cache, and only the selected rows go on.

    Attributes:
        norm: the norm before `mixer`; None if `mixer` includes it, or if its input is already normed.
        close: ends the first half: in torch `AddThenNorm`, or `AddNormedPart.close` if outputs are normed.
        finish: runs the second half and adds it to the stream, maybe in place: in torch `AddPart` or `AddNormedPart`.
    """

    plan: LayerPlan
    norm: WeightedNorm | None
    mixer: Mixer
    close: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    finish: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def __call__(self, stream: torch.Tensor, at: Pass, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Turn the residual stream [rows, hidden_size] into [kept rows, hidden_size], possibly no rows.

        `rows` is the mixer's input if it is already normed. If it is None, the input is made from the stream.
        """
        if rows is None:
            rows = stream if self.norm is None else self.norm(stream)
        if at.kept.is_empty:
            self.mixer.write(rows, at)
            return stream[:0]
        residual = at.kept.residual(stream)
        mixed = self.mixer(rows, at)
        stream, rows = self.close(mixed, residual)
        return self.finish(stream, rows)
