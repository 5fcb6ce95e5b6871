"""The protocol of a backend that attends over cache rows of latent attention (MLA, DeepSeek-V2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.types import AttentionMetadata

MultiplyHeads = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None", "torch.Tensor | None"], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LatentKernels:
    """The kernels before and after latent attention; arguments are those in `spec_kernels.latent_rows` and
    `head_products`.

    Attributes:
        write: norms and rotates the rows of a forward, and writes them to the cache.
        turn: rotates the last channels of query heads, and writes them into absorbed queries.
        multiply: multiplies each head by its matrix, for up to `max_head_rows` rows, and rotates the other channels.
        absorb_and_write: does `multiply` for query heads and also `write`, for a forward whose rows all attend.
    """

    write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], None]
    turn: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    multiply: MultiplyHeads
    absorb_and_write: Callable[..., torch.Tensor]
    max_head_rows: int


class LatentAttentionBackend(Protocol):
    """Attends over a paged cache with one row for each token, which all heads share: kv [slots, row_width].

    Attributes:
        kernels: the kernels that norm, rotate and write; None if a layer does that in torch and calls `write`.
    """

    kernels: LatentKernels | None

    def expect(self, batch_size: int) -> None:
        """Announce the largest number of requests in a round of the run. It is called before anything is computed."""
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
        """Attend with queries [rows, num_heads, row_width], and return [rows, num_heads, value_width].

        Keys are the cache rows, and values are their first `value_width` numbers.
        """
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
        """Attend with queries [rows, num_heads, query_width] without absorption; return [rows, num_heads, v_head_dim].

        First the maps of each head compute its keys and values from all cache rows. This is for many query rows, such
        as a prompt's.

        Args:
            key_map: [num_heads, qk_nope_head_dim, kv_lora_rank]; the rotated channels of queries and rows need no map.
            value_map: [num_heads, kv_lora_rank, v_head_dim].
        """
        ...
