"""Attention for training block drafters on packed texts, without a paged KV cache.

A block drafter calls an attention backend to write keys and values, and to attend. This backend keeps keys and values
as they come, with their gradients. So the code that is trained is the code that drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_lab.core.layer_protocols import RopeWrite
from spec_lab.core.types import AttentionKind, AttentionMetadata
from spec_lab.train.blocks.anchors import AnchoredRows
from spec_lab.train.packed_attention import by_heads


@dataclass(slots=True)
class AnchoredKV:
    """The keys and values of one layer, each [rows, num_kv_heads, head_dim]: first the texts', then the blocks'."""

    context: tuple[Tensor, Tensor] | None = None
    blocks: tuple[Tensor, Tensor] | None = None


class AnchoredCache:
    """Replaces the KV cache during one forward: an `AnchoredKV` for each layer."""

    def __init__(self, num_layers: int) -> None:
        self.layers = tuple(AnchoredKV() for _ in range(num_layers))


class AnchoredAttention:
    """The part of an attention backend that block drafters use. Each anchor is a request.

    A row of a block sees the tokens of its document before the anchor, and the rows of its block up to its own
    position. In a non-causal layer all rows attend from the block's last position, so they see the whole block. In a
    layer with a window, they see only those within it.
    """

    prewrite = True
    supports_in_place_update = False
    rope_write: RopeWrite | None = None
    latent = None

    def __init__(self, rows: AnchoredRows) -> None:
        self._rows = rows

    def build(self, positions: Tensor, seq_lens: Tensor, page_table: Tensor, max_seq_len: int) -> AttentionMetadata:
        none = positions.new_zeros(0)
        return AttentionMetadata(positions.flatten(), none, none, none, positions.shape[1], max_seq_len)

    def advance(self, metadata: AttentionMetadata) -> None:  # pragma: no cover
        raise AssertionError("blocks have no draft loop")

    def derive(self, metadata: AttentionMetadata, kind: AttentionKind, dtype: torch.dtype) -> None:  # pragma: no cover
        raise AssertionError("blocks have no draft loop")

    def write(self, cache: AnchoredKV, metadata: AttentionMetadata, keys: Tensor, values: Tensor) -> None:
        if cache.context is None:
            cache.context = keys, values
        else:
            cache.blocks = keys, values

    def attend(
        self, queries: Tensor, cache: AnchoredKV, metadata: AttentionMetadata, window: int | None, scale: float
    ) -> Tensor:
        """Attend with queries [rows, num_heads, head_dim], and return [rows, num_heads * head_dim]."""
        assert cache.context is not None
        batch, length = self._rows.tokens.shape
        keys, values = (by_heads(part, batch, length) for part in cache.context)
        assert cache.blocks is not None, "only blocks have queries"
        return self._of_blocks(queries * scale, (keys, values), cache.blocks, metadata, window)

    def _of_blocks(
        self,
        queries: Tensor,
        context: tuple[Tensor, Tensor],
        blocks: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        window: int | None,
    ) -> Tensor:
        """Attend to the texts' keys and values [batch, kv heads, length, head_dim], and to those of the row's block."""
        (batch, num_anchors), num_queries = self._rows.anchors.shape, metadata.num_queries
        num_kv_heads = context[0].shape[1]
        # [batch, kv heads, anchors, rows, heads of a KV head, head_dim]
        query = queries.view(batch, num_anchors, num_queries, num_kv_heads, -1, queries.shape[-1]).transpose(2, 3)
        query = query.transpose(1, 2)
        own_keys, own_values = (
            part.view(batch, num_anchors, -1, *part.shape[1:]).permute(0, 3, 1, 2, 4) for part in blocks
        )
        shape, length = query.shape[2:5], context[0].shape[2]
        before = (query.flatten(2, 4) @ context[0].transpose(-1, -2)).unflatten(2, shape)
        within = (query.flatten(3, 4) @ own_keys.transpose(-1, -2)).unflatten(3, shape[1:])
        positions = metadata.positions.view(batch, num_anchors, num_queries)
        size = own_keys.shape[3]
        seen = torch.cat((self._before(positions, window), self._within(positions, size, window)), dim=-1)[
            :, None, :, :, None
        ]
        weights = torch.cat((before, within), dim=-1).masked_fill(~seen, float("-inf")).softmax(-1)
        of_context, of_block = weights.split((length, size), dim=-1)
        mixed = (of_context.flatten(2, 4) @ context[1]).unflatten(2, shape)
        mixed = mixed + (of_block.flatten(3, 4) @ own_values).unflatten(3, shape[1:])
        return mixed.permute(0, 2, 3, 1, 4, 5).reshape(queries.shape[0], -1)

    def _before(self, positions: Tensor, window: int | None) -> Tensor:
        """Return bool [batch, anchors, rows, length]: the tokens of the texts that each row of a block sees."""
        rows = self._rows
        column = torch.arange(rows.tokens.shape[1], device=positions.device)
        document = rows.segments.gather(1, rows.anchors).unsqueeze(2)
        seen = (rows.segments.unsqueeze(1) == document) & (column < rows.anchors.unsqueeze(2))
        seen = seen.unsqueeze(2).expand(-1, -1, positions.shape[2], -1)
        if window is None:
            return seen
        return seen & (rows.positions[:, None, None, :] > positions.unsqueeze(3) - window)

    def _within(self, positions: Tensor, size: int, window: int | None) -> Tensor:
        """Return bool [batch, anchors, rows, block size]: the rows of its own block that each row sees."""
        first = self._rows.positions.gather(1, self._rows.anchors)[:, :, None, None]
        own = first + torch.arange(size, device=positions.device)
        seen = own <= positions.unsqueeze(3)
        return seen if window is None else seen & (own > positions.unsqueeze(3) - window)
