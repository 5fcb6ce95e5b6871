"""Attention of a prompt's long chunks, by a library kernel over keys that are gathered from their pages.

cuDNN's kernel is nearer to the rate of the tensor cores than ours, but it plans for every new shape, which takes 50
milliseconds or more. So a chunk's keys are cut into pieces of only a few sizes: the chunk itself, which is causal, and
powers of two before it. A prompt's last chunk may be padded with rows whose results are not read. The results of the
pieces are merged by the logarithms of their sums of exponentials (Flash-Decoding, Dao et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F

from spec_kernels.narrow_kv_reference import read_rows
from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.types import AttentionMetadata

MIN_KEYS_BEFORE = 8192
"""From this number of keys before a chunk on, this code is faster, although it gathers keys and merges pieces. Chunks
whose rows are a multiple of `FIRST_UNIT` need no keys before them."""

ROW_UNIT = 512
"""Chunks attended here have a multiple of this many rows; a prompt's last chunk is padded to one."""

MIN_KEYS_BEFORE_LAST = 16_384
"""`MIN_KEYS_BEFORE` for a prompt's last chunk. It is larger, since the size of last chunks varies, so cuDNN often has
to plan for it."""

FIRST_UNIT = 4096
"""A chunk with fewer than `MIN_KEYS_BEFORE` keys before it is attended here if it has a multiple of this many rows.
A chunk of another size is mostly a whole prompt, for whose size cuDNN would have to plan."""

MAX_WIDTH = 128
"""The largest head width that cuDNN's kernel supports."""

AttendPiece = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], tuple[torch.Tensor, torch.Tensor]]
"""Attends queries [1, heads, rows, width] over keys and values [1, KV heads, keys, width], causal or not; returns the
result and, in float32, the logarithm of the sum of exponentials [1, heads, rows]."""

MergePieces = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], torch.Tensor]
"""Merges the results of pieces, each [rows, heads, width], by the logarithms of their sums, each [rows, heads]; returns
[rows, heads * width]."""


def attend_by_cudnn(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `AttendPiece` with cuDNN."""
    out, logsumexp, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        queries, keys, values, None, True, 0.0, is_causal, False, scale=scale
    )
    return out, logsumexp.view(out.shape[:3])


def rows_to_plan(metadata: AttentionMetadata, width: int) -> int:
    """Return how many rows `attend_long_chunk` should attend for a chunk: its own, or more with padding.

    It is 0 if the rows are not a chunk of one prompt, or if `attend_long_chunk` would not be faster. It is also 0 if
    the number of keys before the chunk is not a multiple of `ROW_UNIT`, or if cuDNN's kernel does not support the head
    width `width`.
    """
    if metadata.known_len is None or metadata.page_table.shape[0] > 1 or width > MAX_WIDTH or width % 8 > 0:
        return 0
    num_rows = metadata.num_queries
    num_before = metadata.known_len - num_rows
    if num_before % ROW_UNIT > 0:
        return 0
    if num_rows % ROW_UNIT == 0 and num_before % num_rows == 0:
        return num_rows if num_before >= MIN_KEYS_BEFORE or num_rows % FIRST_UNIT == 0 else 0
    is_worth_it = num_before >= MIN_KEYS_BEFORE_LAST and num_rows >= ROW_UNIT
    return -(-num_rows // ROW_UNIT) * ROW_UNIT if is_worth_it else 0


def pieces_before(num_before: int) -> Iterator[tuple[int, int]]:
    """Yield the first key and the size of pieces of [0, num_before): distinct powers of two, largest first."""
    first = 0
    for power in reversed(range(num_before.bit_length())):
        if num_before >> power & 1:
            yield first, 1 << power
            first += 1 << power


def attend_long_chunk(
    queries: torch.Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    page_size: int,
    scale: float,
    attend_piece: AttendPiece,
    merge_pieces: MergePieces,
    num_planned: int,
) -> torch.Tensor:
    """Attend a chunk's queries [rows, heads, width] over all keys up to their own; returns [rows, heads * width].

    Args:
        num_planned: the result of `rows_to_plan`.
    """
    assert metadata.known_len is not None
    num_rows, num_keys = metadata.num_queries, metadata.known_len
    num_before, num_filling = num_keys - num_rows, num_planned - num_rows
    gathered = _gathered(cache, metadata, page_size, num_keys + num_filling, queries.dtype)
    keys, values = gathered.permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
    filled = F.pad(queries, (0, 0, 0, 0, 0, num_filling)) if num_filling else queries
    heads = filled.transpose(0, 1).unsqueeze(0)
    parts = [attend_piece(heads, keys[:, :, num_before:], values[:, :, num_before:], True, scale)]
    for first, size in pieces_before(num_before):
        span = slice(first, first + size)
        parts.append(attend_piece(heads, keys[:, :, span], values[:, :, span], False, scale))
    if len(parts) == 1:
        return parts[0][0][0].transpose(0, 1)[:num_rows].flatten(1)
    pieces = [piece[0].transpose(0, 1)[:num_rows] for piece, _ in parts]
    return merge_pieces(pieces, [total[0].t()[:num_rows] for _, total in parts])


def _gathered(
    cache: LayerCache, metadata: AttentionMetadata, page_size: int, num_keys: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return keys and values of a request in order, [num_keys, 2, KV heads, width], zeros after its end."""
    assert metadata.known_len is not None
    num_pages = -(-metadata.known_len // page_size)
    gathered = cache.kv.new_empty(max(num_keys, num_pages * page_size), *cache.kv.shape[1:], dtype=dtype)
    pages, whole = metadata.page_table[0, :num_pages], gathered[: num_pages * page_size].unflatten(0, (-1, page_size))
    by_page = cache.kv.unflatten(0, (-1, page_size))
    if cache.powers is None:
        torch.index_select(by_page, 0, pages, out=whole)
    else:
        whole.copy_(read_rows(by_page, cache.powers.unflatten(0, (-1, page_size)), pages, dtype))
    gathered[metadata.known_len :] = 0
    return gathered[:num_keys]
