"""An attention backend over packed rows of documents, without a paged cache, for frozen targets in a training.

A target's layers call a backend to write keys and values and to attend. This one keeps the keys and values of one
forward, and lets a token see only its own document, up to itself. So the layers, weights and taps are those of
the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.core.layer_protocols import RopeWrite
from spec_lab.core.types import AttentionKind, AttentionMetadata


@dataclass(slots=True)
class PackedKV:
    """The keys and values of one layer, [batch * length, num_kv_heads, head_dim] each, after they are written."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def by_heads(self, batch: int, length: int) -> tuple[Tensor, Tensor]:
        """Return both once they are written, [batch, heads, length, head_dim]."""
        assert self.keys is not None and self.values is not None
        return by_heads(self.keys, batch, length), by_heads(self.values, batch, length)


class PackedCache:
    """Replaces the KV cache in one forward: a `PackedKV` for each layer; layers that share KV have the same one."""

    def __init__(self, plans: Sequence[LayerPlan]) -> None:
        own = [PackedKV() for _ in plans]
        self.layers = tuple(own[index if plan.kv_owner is None else plan.kv_owner] for index, plan in enumerate(plans))

    def by_heads(self, batch: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of each layer once all are written, [batch, heads, length, head_dim]."""
        return [layer.by_heads(batch, length) for layer in self.layers]


@dataclass(slots=True)
class PackedMetadata(AttentionMetadata):
    """The metadata of one forward. Of the fields of the base class, only the positions are used.

    Attributes:
        segments: [batch, length] the document of each token; equal numbers within a row are one document.
        visible: the masks [batch, 1, length, length] by window; True if a token sees another.
    """

    segments: Tensor = field(default_factory=lambda: torch.zeros(1, 1))
    visible: dict[int | None, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, segments: Tensor, positions: Tensor) -> PackedMetadata:
        """Make the metadata of rows [batch, length]."""
        flat, none = positions.reshape(-1), positions.new_zeros(0)
        return cls(flat, none, none, none, segments.shape[1], segments.shape[1], segments=segments)

    def mask(self, window: int | None) -> Tensor:
        """Return the mask of a window, which all layers that have it share."""
        if window not in self.visible:
            self.visible[window] = visible_rows(self.segments, window)
        return self.visible[window]


def visible_rows(segments: Tensor, window: int | None = None) -> Tensor:
    """Return the mask [batch, 1, length, length]: a token sees itself and earlier tokens of its document, at
    most `window` in total."""
    near = window_rows(segments.shape[1], window, segments.device)
    return (near & (segments[:, :, None] == segments[:, None, :]))[:, None]


def window_rows(num_rows: int, window: int | None, device: torch.device) -> Tensor:
    """Return the mask [rows, rows]: a row sees itself and the rows before it, at most `window` in total."""
    row = torch.arange(num_rows, device=device)
    distance = row[:, None] - row[None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


class PackedAttention:
    """The part of an attention backend that a forward over whole rows uses."""

    prewrite = True
    supports_in_place_update = False
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
        self, queries: Tensor, cache: PackedKV, metadata: PackedMetadata, window: int | None, scale: float
    ) -> Tensor:
        """Attend with queries [batch * length, num_heads, head_dim]; return [batch * length, num_heads * head_dim]."""
        assert cache.keys is not None and cache.values is not None
        batch, length = metadata.segments.shape
        group = queries.shape[1] // cache.keys.shape[1]
        query = by_heads(queries, batch, length)
        key, value = (by_heads(rows, batch, length).repeat_interleave(group, 1) for rows in (cache.keys, cache.values))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=metadata.mask(window), scale=scale)
        return out.transpose(1, 2).reshape(batch * length, -1)


def by_heads(rows: Tensor, batch: int, length: int) -> Tensor:
    """Turn [batch * length, heads, head_dim] into [batch, heads, length, head_dim]."""
    return rows.unflatten(0, (batch, length)).transpose(1, 2)
