"""The promises that a model's layers build on: attention over a paged cache, and the choice of the rows that go on.

Implementations are in `spec_lab.attention` and `spec_lab.core`.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch

from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.latent_protocols import LatentAttentionBackend
from spec_lab.core.types import AttentionMetadata


class MetadataMover(Protocol):
    """Moves the metadata of a draft between two steps of the loop."""

    def advance(self, metadata: AttentionMetadata) -> None:
        """Move one-row metadata to the next position, in place."""
        ...


class RopeWrite(Protocol):
    """Norms heads, rotates queries and keys and writes K and V in one kernel: `spec_kernels.rope_write`."""

    def __call__(
        self,
        queries: torch.Tensor,
        kv: torch.Tensor | None,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        slot_mapping: torch.Tensor,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        norms_values: bool = False,
    ) -> None: ...


class AttentionBackend(MetadataMover, Protocol):
    """Attention over a paged KV cache.

    Attributes:
        prewrite: whether K and V may be written before attention, so that dead query rows can be dropped in between
            (tokenspeed's `support_kv_cache_prewrite`).
        supports_in_place_update: whether `advance` may be captured: it leaves exactly what `build` would make at the
            next position, in the same tensors (vLLM #46849's `supports_draft_decode_metadata_update`). Launched from
            Python it works with every backend.
        rope_write: the kernel of attention whose heads it fits; None to rotate first and `write` then.
        latent: attention over the cache rows of latent layers; None where the backend has none.
    """

    prewrite: bool
    supports_in_place_update: bool
    rope_write: RopeWrite | None
    latent: LatentAttentionBackend | None

    def build(
        self, positions: torch.Tensor, seq_lens: torch.Tensor, page_table: torch.Tensor, max_seq_len: int
    ) -> AttentionMetadata:
        """Make the metadata for query rows at `positions` [batch, num_queries] of requests with `seq_lens` [batch]
        keys."""
        ...

    def write(self, cache: LayerCache, metadata: AttentionMetadata, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write [rows, num_kv_heads, head_dim] keys and values to `metadata.slot_mapping`."""
        ...

    def attend(
        self,
        queries: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        window: int | None,
        scale: float,
    ) -> torch.Tensor:
        """Let [rows, num_heads, head_dim] queries attend; returns [rows, num_heads * head_dim]."""
        ...


class RowSelection(Protocol):
    """Chooses which rows of a layer go on past its KV write, and where the others are dropped.

    Attributes:
        is_empty: no row goes on; the layer only writes KV.
    """

    is_empty: ClassVar[bool]

    @property
    def live_rows(self) -> torch.Tensor | None:
        """The flat indices [live rows] of those that go on, in the layer or behind it; None where all do."""
        ...

    def queries(self, queries: torch.Tensor, metadata: AttentionMetadata) -> tuple[torch.Tensor, AttentionMetadata]:
        """Pick the rows that attend, and return them with the metadata that fits them."""
        ...

    def attended(self, rows: torch.Tensor) -> torch.Tensor:
        """Pick the rows of the attention output that go on."""
        ...

    def residual(self, rows: torch.Tensor) -> torch.Tensor:
        """Pick the residual rows that meet them."""
        ...

    def live(self, rows: torch.Tensor) -> torch.Tensor:
        """Pick the live rows of the layer's output, for selections that dropped nothing inside it."""
        ...

    def behind(self, metadata: AttentionMetadata) -> AttentionMetadata | None:
        """Return the metadata of the rows that go on, for a layer behind the one they were chosen in; None where there
        is none, so that no layer can follow."""
        ...
