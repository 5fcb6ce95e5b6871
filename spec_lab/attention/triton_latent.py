"""Latent attention of attention=triton: a paged kernel for few rows, and torch for rows of trees and for the unfolded
rows of a prompt."""

from __future__ import annotations

import torch

from spec_kernels.attention_tiles import choose_latent_split_keys
from spec_kernels.head_products import MAX_HEAD_ROWS, absorb_and_write, multiply_heads
from spec_kernels.latent_attention import latent_attention
from spec_kernels.latent_rows import turn_queries, write_latents
from spec_lab.attention.torch_latent import KeyReader, TorchLatentAttention
from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.latent_protocols import LatentKernels
from spec_lab.core.types import AttentionMetadata


class TritonLatentAttention(TorchLatentAttention):
    """Latent attention in Triton. In the kernel a row's output does not depend on the other rows in the batch.

    Torch attends rows that are unfolded or belong to a tree.
    """

    def __init__(self, keys: KeyReader, page_size: int, max_positions: int, batch_size: int = 1) -> None:
        """`max_positions` and `batch_size` are the run's maxima. Splits depend on these, and not on the current
        batch."""
        super().__init__(keys)
        self.kernels = LatentKernels(
            write_latents, turn_queries, multiply_heads, absorb_and_write, max_head_rows=MAX_HEAD_ROWS
        )
        self._page_size = page_size
        self._max_positions = max_positions
        self._batch_size = batch_size

    def expect(self, batch_size: int) -> None:
        self._batch_size = batch_size

    def attend(
        self,
        queries: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        window: int | None,
        value_width: int,
        scale: float,
    ) -> torch.Tensor:
        if metadata.tree is not None:
            return super().attend(queries, cache, metadata, window, value_width, scale)
        return latent_attention(
            queries,
            cache.kv,
            metadata.page_table,
            metadata.lens_in(window),
            self._page_size,
            metadata.max_seq_len,
            choose_latent_split_keys(self._max_positions, self._batch_size, queries.shape[1]),
            scale,
            window,
            value_width,
        )
