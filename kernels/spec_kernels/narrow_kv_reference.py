"""Keys and values in e4m3, an 8-bit floating point format, with a power of two for each head of each cached token.

A token's key (or value) of one head is divided by the least power with which its largest number is at most 448, and
rounded. So a number keeps its four significant bits, whatever the size of its row, and is widened exactly: in
16 bits as in float32. What a token's row holds depends on nothing else: not on the prompt's chunks, nor on its
neighbours, nor on the page. vLLM and SGLang have one scale for a layer, from the checkpoint or 1.
"""

from __future__ import annotations

import torch

KV_DTYPE = torch.float8_e4m3fn
_LEAST = 27


def narrowed(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows [..., 2, num_kv_heads, head_dim] to e4m3.

    Returns:
        The numbers, and the powers of keys and values [..., num_kv_heads, 2] in bfloat16.
    """
    wide = rows.float()
    # The exponent of the largest number is in the bits of a float32; 448 is 1.75 * 2^8.
    biased = ((wide.abs().amax(-1).view(torch.int32) + 0x1FFFFF >> 23) - 8).clamp_(min=_LEAST)
    values = wide * (254 - biased << 23).view(torch.float32).unsqueeze(-1)
    return values.to(KV_DTYPE), (biased << 23).view(torch.float32).to(torch.bfloat16).transpose(-1, -2).contiguous()


def widened(rows: torch.Tensor, powers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers that rows and powers, as `narrowed` returns them, stand for."""
    return (rows.float() * powers.float().transpose(-1, -2).unsqueeze(-1)).to(dtype)


def assert_cache_of(kv: torch.Tensor, powers: torch.Tensor | None, dtype: torch.dtype) -> None:
    """Check that a cache has the dtype of its queries, or e4m3 and powers."""
    if powers is None:
        assert kv.dtype == dtype
    else:
        assert kv.dtype == KV_DTYPE and powers.dtype == torch.bfloat16
        assert powers.shape == (kv.shape[0], kv.shape[2], 2) and powers.is_contiguous()


def write_rows(kv: torch.Tensor, powers: torch.Tensor | None, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Write rows [rows, *shape] to `slots` of a cache's `kv` [num_slots, *shape], narrowed if there are `powers`."""
    if powers is not None:
        rows, of_rows = narrowed(rows)
        powers.index_copy_(0, slots, of_rows)
        kv, rows = kv.view(torch.uint8), rows.view(torch.uint8)  # torch copies no e4m3 rows by index
    kv.index_copy_(0, slots, rows)


def read_rows(kv: torch.Tensor, powers: torch.Tensor | None, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows in `slots`, in `dtype` if they were narrowed."""
    rows = kv.index_select(0, slots)
    return rows if powers is None else widened(rows, powers.index_select(0, slots), dtype)
