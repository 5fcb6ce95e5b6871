"""Keys and values in e4m3, an 8-bit floating point format, with a power of two for each head of each cached token.

A token's key (or value) of one head is divided by 2^exponent, the least power with which its largest number is at most
448, and rounded. So a number keeps its four significant bits, whatever the size of its row, and is widened exactly: in
16 bits as in float32. What a token's row holds depends on nothing else: not on the prompt's chunks, nor on its
neighbours, nor on the page. vLLM and SGLang have one scale for a layer, from the checkpoint or 1.
"""

from __future__ import annotations

import torch

KV_DTYPE = torch.float8_e4m3fn
_LEAST = -100


def narrowed(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows [..., head_dim] to e4m3; return the numbers, and the exponents [...] int8."""
    wide = rows.float()
    # The exponent of the largest number is in the bits of a float32; 448 is 1.75 * 2^8.
    exponents = ((wide.abs().amax(-1).view(torch.int32) + 0x1FFFFF >> 23) - 135).clamp_(min=_LEAST)
    return (wide * _powers(-exponents)).to(KV_DTYPE), exponents.to(torch.int8)


def widened(rows: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers that e4m3 rows [..., head_dim] and exponents [...] stand for."""
    return (rows.float() * _powers(exponents.int())).to(dtype)


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2^exponents [..., 1], exactly."""
    return (exponents + 127 << 23).view(torch.float32).unsqueeze(-1)


def assert_cache_of(kv: torch.Tensor, exponents: torch.Tensor | None, dtype: torch.dtype) -> None:
    """Check that a cache has the dtype of its queries, or e4m3 and exponents."""
    if exponents is None:
        assert kv.dtype == dtype
    else:
        assert kv.dtype == KV_DTYPE and exponents.dtype == torch.int8
        assert exponents.shape == kv.shape[:3] and exponents.is_contiguous()


def write_rows(kv: torch.Tensor, exponents: torch.Tensor | None, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Write rows [rows, *shape] to `slots` of a cache's `kv` [num_slots, *shape], narrowed if there are `exponents`."""
    if exponents is not None:
        rows, of_rows = narrowed(rows)
        exponents.index_copy_(0, slots, of_rows)
        kv, rows = kv.view(torch.uint8), rows.view(torch.uint8)  # torch copies no e4m3 rows by index
    kv.index_copy_(0, slots, rows)


def read_rows(
    kv: torch.Tensor, exponents: torch.Tensor | None, slots: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the rows in `slots`, in `dtype` if they were narrowed."""
    rows = kv.index_select(0, slots)
    return rows if exponents is None else widened(rows, exponents.index_select(0, slots), dtype)
