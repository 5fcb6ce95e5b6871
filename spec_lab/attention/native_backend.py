"""attention=torch with kernels=native: metadata made in C. The attention of few rows is inside the native layers."""

from __future__ import annotations

import torch

from spec_kernels.native.rounds import advance_metadata, build_metadata
from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.core.types import AttentionKind, AttentionMetadata


class NativeAttention(TorchAttention):
    """Builds metadata in one C call, and advances it in another.

    More than a few rows attend as in the base class, which adds read slots and masks to the metadata. The base class
    then advances it instead of the C call.
    """

    def build(
        self, positions: torch.Tensor, seq_lens: torch.Tensor, page_table: torch.Tensor, max_seq_len: int
    ) -> AttentionMetadata:
        clamped, slots = (positions.new_empty(positions.numel()) for _ in range(2))
        lengths = torch.empty_like(seq_lens)
        build_metadata(
            clamped, slots, lengths, positions.contiguous(), seq_lens, page_table, self.page_size, self.max_positions
        )
        return AttentionMetadata(
            clamped, slots, lengths, page_table, num_queries=positions.shape[1], max_seq_len=max_seq_len
        )

    def advance(self, metadata: AttentionMetadata) -> None:
        if metadata.read_slots is not None or metadata.masks:
            super().advance(metadata)
            return
        assert metadata.num_queries == 1
        advance_metadata(
            metadata.positions,
            metadata.slot_mapping,
            metadata.seq_lens,
            metadata.page_table,
            self.page_size,
            self.max_positions,
        )

    def derive(self, metadata: AttentionMetadata, kind: AttentionKind, dtype: torch.dtype) -> None:
        """Do nothing: the native layers read positions, slots and lengths."""
