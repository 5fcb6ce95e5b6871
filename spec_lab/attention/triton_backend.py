"""attention=triton: the paged kernels of `spec_kernels`, on a CUDA device or in Triton's interpreter."""

from __future__ import annotations

import torch

from spec_kernels.attention import paged_attention
from spec_kernels.attention_tiles import choose_split_keys
from spec_kernels.merge_pieces import merge_pieces
from spec_kernels.metadata import advance_metadata, build_metadata
from spec_kernels.rope_write import write_kv
from spec_kernels.tree_metadata import place_branches, place_tree
from spec_lab.attention.long_prompts import AttendPiece, attend_long_chunk, rows_to_plan
from spec_lab.attention.torch_tree import TorchTreeAttention
from spec_lab.attention.triton_latent import TritonLatentAttention
from spec_lab.core.draft_tree import TreeRows
from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.latent_protocols import LatentAttentionBackend
from spec_lab.core.layer_protocols import RopeWrite
from spec_lab.core.types import AttentionKind, AttentionMetadata


class TritonAttention:
    """An `AttentionBackend` of Triton. The kernel itself derives windows and key positions from `seq_lens` and the page
    table. The kernel's output for a row does not depend on the other rows in the batch. For a row of a tree it is bit
    for bit that of the chain that leads to the row.

    A library may attend long chunks, and torch some rows of latent attention.
    """

    row_invariant = True

    def __init__(
        self,
        page_size: int,
        max_positions: int,
        rope_write: RopeWrite | None = None,
        attend_piece: AttendPiece | None = None,
    ) -> None:
        """`attend_piece`: a library's attention for long prompts; if None, our kernel attends them."""
        self.rope_write = rope_write
        self._attend_piece = attend_piece
        self._page_size = page_size
        self._max_positions = max_positions
        self._reference = TorchTreeAttention(page_size, max_positions)
        self.latent: LatentAttentionBackend | None = TritonLatentAttention(self._reference, page_size, max_positions)

    def build(
        self, positions: torch.Tensor, seq_lens: torch.Tensor, page_table: torch.Tensor, max_seq_len: int
    ) -> AttentionMetadata:
        places = build_metadata(positions.contiguous(), seq_lens, page_table, self._page_size, self._max_positions)
        return AttentionMetadata(*places, page_table, positions.shape[1], max_seq_len)

    def advance(self, metadata: AttentionMetadata) -> None:
        assert metadata.num_queries == 1
        advance_metadata(
            metadata.positions,
            metadata.slot_mapping,
            metadata.seq_lens,
            metadata.page_table,
            self._page_size,
            self._max_positions,
        )

    def derive(self, metadata: AttentionMetadata, kind: AttentionKind, dtype: torch.dtype) -> None:
        """Do nothing: the kernel derives windows and key positions itself."""

    def write(self, cache: LayerCache, metadata: AttentionMetadata, keys: torch.Tensor, values: torch.Tensor) -> None:
        write_kv(cache.kv, keys, values, metadata.slot_mapping, cache.powers)

    def attend(
        self,
        queries: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        window: int | None,
        scale: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        piece = self._attend_piece
        is_plain = window is None and sinks is None
        if piece is not None and is_plain and (num_planned := rows_to_plan(metadata, queries.shape[2])):
            return attend_long_chunk(queries, cache, metadata, self._page_size, scale, piece, merge_pieces, num_planned)
        tree = metadata.tree
        return paged_attention(
            queries,
            cache.kv,
            metadata.page_table,
            metadata.lens_in(window),
            self._page_size,
            metadata.max_seq_len,
            choose_split_keys(self._max_positions, cache.kv.element_size()),
            scale,
            window,
            None if tree is None else tree.path_slots,
            None if tree is None else tree.depths,
            0 if tree is None else tree.num_tail,
            sinks,
            cache.powers,
        )

    def build_tree(
        self, parents: torch.Tensor, depth: int, prefix_lens: torch.Tensor, page_table: torch.Tensor, max_seq_len: int
    ) -> AttentionMetadata:
        places = place_tree(parents, depth, prefix_lens, page_table, self._page_size, self._max_positions)
        return _metadata_of(places, parents.shape[1], page_table, max_seq_len)

    def build_branches(
        self,
        before: TreeRows | None,
        came_from: torch.Tensor,
        prefix_lens: torch.Tensor,
        page_table: torch.Tensor,
        max_seq_len: int,
    ) -> AttentionMetadata:
        slots_before, num_before = (None, 0) if before is None else (before.path_slots, before.num_tail)
        sizes = self._page_size, self._max_positions
        places = place_branches(slots_before, came_from, prefix_lens, page_table, num_before, *sizes)
        return _metadata_of(places, num_before + came_from.shape[1], page_table, max_seq_len)


def _metadata_of(
    places: tuple[torch.Tensor, ...], num_tail: int, page_table: torch.Tensor, max_seq_len: int
) -> AttentionMetadata:
    """Return metadata for rows of trees, whose kernels made `places`."""
    positions, slots, lens, depths, path_slots = places
    rows = TreeRows(path_slots, depths, num_tail)
    return AttentionMetadata(
        positions, slots, lens, page_table, num_queries=depths.shape[1], max_seq_len=max_seq_len, tree=rows
    )
