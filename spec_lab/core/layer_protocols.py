"""The protocols that a model's layers use: attention over a paged cache.

Most implementations are in `spec_lab.attention` and `spec_lab.core`; those for training are in `spec_lab.train`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.latent_protocols import LatentAttentionBackend
from spec_lab.core.types import AttentionKind, AttentionMetadata


class MetadataMover(Protocol):
    """Advances the metadata of a draft between two draft steps."""

    def advance(self, metadata: AttentionMetadata) -> None:
        """Move one-row metadata to the next position: the same tensors then have exactly the values that `build` would
        make for it. A graph may capture this (vLLM #46849)."""
        ...


RopeWrite = Callable[..., torch.Tensor]
"""One kernel that rotates queries and keys, and writes K and V: `spec_kernels.rope_write`. It can first norm heads."""


class AttentionBackend(MetadataMover, Protocol):
    """Attention over a paged KV cache.

    Attributes:
        rope_write: the fused kernel, for heads of sizes that it supports; None if rotation and `write` are separate.
        latent: attention over the cache rows of latent layers; None if the backend has none.
    """

    rope_write: RopeWrite | None
    latent: LatentAttentionBackend | None

    def build(
        self, positions: torch.Tensor, seq_lens: torch.Tensor, page_table: torch.Tensor, max_seq_len: int
    ) -> AttentionMetadata:
        """Make the metadata of query rows at `positions` [batch, num_queries] in requests with `seq_lens` [batch]
        keys."""
        ...

    def derive(self, metadata: AttentionMetadata, kind: AttentionKind, dtype: torch.dtype) -> None:
        """Add to `metadata` what `attend` would derive from it for queries of `dtype` in layers of this kind."""
        ...

    def write(self, cache: LayerCache, metadata: AttentionMetadata, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values, both [rows, num_kv_heads, head_dim], to `metadata.slot_mapping`."""
        ...

    def attend(
        self,
        queries: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        window: int | None,
        scale: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with queries [rows, num_heads, head_dim] over the keys up to `metadata.lens_in(window)`; return
        [rows, num_heads * head_dim]. `sinks` [num_heads], if given, is the score of one more key for each head, whose
        value is zero."""
        ...
