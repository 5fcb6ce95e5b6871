"""Rows of packed texts, and an attention backend over them in place of a paged cache.

A target's layers call a backend to write keys and values and to attend. This one keeps the keys and values of one
forward, and lets a token see only its own text, up to itself. So the layers, weights and taps are those of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_lab.attention.torch_backend import with_sink
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.core.layer_protocols import RopeWrite
from spec_lab.core.types import AttentionKind, AttentionMetadata


def generator_of(step: int, seed: int) -> torch.Generator:
    """Return the generator of a step, on the CPU."""
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of packed texts, [rows, length] each.

    Attributes:
        tokens: ids; 0 for padding.
        segments: number of each token's text in its row, from 1; 0 for padding.
        positions: place of each token in its text.
        is_supervised: True for tokens that the target wrote.
    """

    tokens: Tensor
    segments: Tensor
    positions: Tensor
    is_supervised: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the four in their order."""
        return self.tokens, self.segments, self.positions, self.is_supervised

    def to(self, device: torch.device) -> PackedRows:
        return PackedRows(*(tensor.to(device) for tensor in self.tensors()))

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, picked: Tensor | slice) -> PackedRows:
        return PackedRows(*(tensor[picked] for tensor in self.tensors()))

    def batch(self, step: int, batch_size: int, seed: int) -> PackedRows:
        """Return the rows of a step, which depend only on seed and step. Each epoch is a new order of all rows."""
        numbers = torch.arange(step * batch_size, (step + 1) * batch_size)
        picked = torch.empty_like(numbers)
        for epoch in (numbers // len(self)).unique().tolist():
            order = torch.randperm(len(self), generator=generator_of(epoch, seed))
            inside = numbers // len(self) == epoch
            picked[inside] = order[numbers[inside] % len(self)]
        return self.rows(picked.to(self.tokens.device))


@dataclass(slots=True)
class PackedKV:
    """The keys and values of one layer, [batch * length, num_kv_heads, head_dim] each, after they are written."""

    keys: Tensor | None = None
    values: Tensor | None = None


class PackedCache:
    """Replaces the KV cache in one forward: a `PackedKV` for each layer; layers that share KV have the same one."""

    def __init__(self, plans: Sequence[LayerPlan]) -> None:
        own = [PackedKV() for _ in plans]
        self.layers = tuple(own[index if plan.kv_owner is None else plan.kv_owner] for index, plan in enumerate(plans))

    def by_heads(self, batch: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of each layer once all are written, [batch, heads, length, head_dim]."""
        found = []
        for layer in self.layers:
            assert layer.keys is not None and layer.values is not None
            found.append((by_heads(layer.keys, batch, length), by_heads(layer.values, batch, length)))
        return found


@dataclass(slots=True)
class PackedMetadata(AttentionMetadata):
    """The metadata of one forward. Of the fields of the base class, only the positions are used.

    Attributes:
        segments: [batch, length] the text of each token; equal numbers within a row are one text.
        visible: the masks [batch, 1, length, length] by window; True if a token sees another.
    """

    segments: Tensor = field(default_factory=lambda: torch.zeros(1, 1))
    visible: dict[int | None, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, segments: Tensor, positions: Tensor) -> PackedMetadata:
        """Make the metadata of rows [batch, length]."""
        none = positions.new_zeros(0)
        length = segments.shape[1]
        return cls(positions.reshape(-1), none, none, none, num_queries=length, max_seq_len=length, segments=segments)

    def mask(self, window: int | None) -> Tensor:
        """Return the mask of a window, which all layers that have it share."""
        if window not in self.visible:
            self.visible[window] = visible_rows(self.segments, window)
        return self.visible[window]


def visible_rows(segments: Tensor, window: int | None = None) -> Tensor:
    """Return the mask [batch, 1, length, length]: a token sees itself and earlier tokens of its text, at most `window`
    in total."""
    row = torch.arange(segments.shape[1], device=segments.device)
    distance = row[:, None] - row[None, :]
    near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return (near & (segments[:, :, None] == segments[:, None, :]))[:, None]


class PackedAttention:
    """The part of an attention backend that a forward over whole rows uses."""

    rope_write: RopeWrite | None = None
    latent = None

    def build(
        self, positions: Tensor, seq_lens: Tensor, page_table: Tensor, max_seq_len: int
    ) -> AttentionMetadata:  # pragma: no cover - rows are packed by PackedMetadata
        raise AssertionError("packed rows have no pages")

    def advance(self, metadata: AttentionMetadata) -> None:  # pragma: no cover
        raise AssertionError("packed rows have no draft loop")

    def derive(self, metadata: AttentionMetadata, kind: AttentionKind, dtype: torch.dtype) -> None:  # pragma: no cover
        raise AssertionError("packed rows have no draft loop")

    def write(self, cache: PackedKV, metadata: AttentionMetadata, keys: Tensor, values: Tensor) -> None:
        cache.keys, cache.values = keys, values

    def attend(
        self,
        queries: Tensor,
        cache: PackedKV,
        metadata: PackedMetadata,
        window: int | None,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend with queries [batch * length, num_heads, head_dim]; return [batch * length, num_heads * head_dim]."""
        assert cache.keys is not None and cache.values is not None
        batch, length = metadata.segments.shape
        group = queries.shape[1] // cache.keys.shape[1]
        query = by_heads(queries, batch, length)
        key, value = (by_heads(rows, batch, length).repeat_interleave(group, 1) for rows in (cache.keys, cache.values))
        mask = metadata.mask(window)
        if sinks is not None:
            added = query.new_zeros(mask.shape).masked_fill_(~mask, float("-inf"))
            key, value, mask = with_sink(key, value, added, sinks)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
        return out.transpose(1, 2).reshape(batch * length, -1)


def by_heads(rows: Tensor, batch: int, length: int) -> Tensor:
    """Turn [batch * length, heads, head_dim] into [batch, heads, length, head_dim]."""
    return rows.unflatten(0, (batch, length)).transpose(1, 2)
