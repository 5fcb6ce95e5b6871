"""The promise of a backend that attends over the cache rows of latent attention (MLA, DeepSeek-V2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.types import AttentionMetadata

MultiplyHeads = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None", "torch.Tensor | None"], None]


@dataclass(frozen=True, slots=True)
class LatentKernels:
    """The kernels of what stands around latent attention (`spec_kernels.latent_rows` and `head_products`, whose
    arguments they have).

    Attributes:
        write: norms and rotates the rows of a forward, and writes them to the cache.
        turn: rotates the last channels of query heads into absorbed queries.
        multiply: multiplies each head of up to `max_head_rows` rows with its matrix, and rotates its other channels.
        absorb_and_write: does that to query heads, and what `write` does, for rows that all attend.
    """

    write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], None]
    turn: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    multiply: MultiplyHeads
    absorb_and_write: Callable[..., None]
    max_head_rows: int


class LatentAttentionBackend(Protocol):
    """Attends over a paged cache of one row a token, which all heads share: kv [slots, row_width].

    Attributes:
        kernels: what a layer norms, rotates and writes with; None to do that in torch, and `write` then.
    """

    kernels: LatentKernels | None

    def expect(self, batch_size: int) -> None:
        """Take note of the most requests that a round of the run has. It is known before anything is computed."""
        ...

    def write(self, cache: LayerCache, metadata: AttentionMetadata, rows: torch.Tensor) -> None:
        """Write [rows, row_width] to `metadata.slot_mapping`."""
        ...

    def attend(
        self,
        queries: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        window: int | None,
        value_width: int,
        scale: float,
    ) -> torch.Tensor:
        """Let [rows, num_heads, row_width] queries attend, whose keys are the rows and whose values are the first
        `value_width` numbers of them; returns [rows, num_heads, value_width]."""
        ...

    def attend_unfolded(
        self,
        queries: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        window: int | None,
        key_map: torch.Tensor,
        value_map: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Let [rows, num_heads, query_width] queries attend over keys and values that the maps of each head make of all
        rows; returns values [rows, num_heads, v_head_dim]. It is for many rows, as of a prompt.

        Args:
            key_map: [num_heads, qk_nope_head_dim, kv_lora_rank]; the rest of a query meets the rest of a row.
            value_map: [num_heads, kv_lora_rank, v_head_dim].
        """
        ...
