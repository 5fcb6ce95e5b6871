"""Attention of a chunk far behind the start of its prompt, by a library's kernel over keys gathered from their pages.

cuDNN's kernel comes nearer to the tensor cores' rate than ours, and plans anew for every shape, for tens to hundreds of
milliseconds. So a chunk's keys are cut into pieces of few sizes: the chunk itself, which is causal, and before it
powers of two of its size. Pieces are merged by the logarithms of their sums (Flash-Decoding, Dao et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.types import AttentionMetadata

MIN_KEYS_BEFORE = 8192
"""So many keys before a chunk make it worth gathering them and merging pieces."""

ROW_UNIT = 512
"""Chunks of other sizes are the last ones of their prompts, for whose sizes no kernel is worth its planning."""

MAX_WIDTH = 128
"""Wider heads have no such kernel."""

AttendPiece = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], tuple[torch.Tensor, torch.Tensor]]
"""Attends queries [1, heads, rows, width] over keys and values [1, KV heads, keys, width], causal or not; returns the
result and, in float32, the logarithm of the sum of exponentials [1, heads, rows]."""


def attend_by_cudnn(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keeps the promise of `AttendPiece`."""
    out, logsumexp, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        queries, keys, values, None, True, 0.0, is_causal, False, scale=scale
    )
    return out, logsumexp.view(out.shape[:3])


def is_long_chunk(metadata: AttentionMetadata, width: int) -> bool:
    """Says whether rows are a chunk of one prompt for `attend_long_chunk`, with heads of this width."""
    if metadata.known_len is None or metadata.page_table.shape[0] > 1 or width > MAX_WIDTH or width % 8 > 0:
        return False
    num_rows = metadata.num_queries
    num_before = metadata.known_len - num_rows
    return num_rows % ROW_UNIT == 0 and num_before >= MIN_KEYS_BEFORE and num_before % num_rows == 0


def pieces_before(num_before: int, unit: int) -> Iterator[tuple[int, int]]:
    """Yield first key and size of pieces of [0, num_before): each `unit` times another power of two, largest first."""
    first = 0
    for power in reversed(range((num_before // unit).bit_length())):
        size = unit << power
        if num_before - first >= size:
            yield first, size
            first += size


def attend_long_chunk(
    queries: torch.Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    page_size: int,
    scale: float,
    attend_piece: AttendPiece,
) -> torch.Tensor:
    """Attend a chunk's queries [rows, heads, width] over all keys up to their own; returns [rows, heads * width]."""
    assert metadata.known_len is not None
    kv, num_rows, num_keys = cache.kv, metadata.num_queries, metadata.known_len
    pages, num_before = metadata.page_table[0], num_keys - num_rows
    by_page = kv.view(-1, page_size, *kv.shape[1:])
    gathered = by_page.index_select(0, pages[: -(-num_keys // page_size)]).flatten(0, 1)
    keys, values = gathered.permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
    heads = queries.transpose(0, 1).unsqueeze(0)
    own = slice(num_before, num_keys)
    piece, total = attend_piece(heads, keys[:, :, own], values[:, :, own], True, scale)
    merged = piece.float()
    for first, size in pieces_before(num_before, num_rows):
        span = slice(first, first + size)
        piece, logsumexp = attend_piece(heads, keys[:, :, span], values[:, :, span], False, scale)
        merged.lerp_(piece.float(), torch.sigmoid(logsumexp - total).unsqueeze(-1))
        total = torch.logaddexp(total, logsumexp)
    return merged.to(queries.dtype).transpose(1, 2).reshape(num_rows, -1)
