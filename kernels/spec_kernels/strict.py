"""Strict greedy acceptance: the argmax of every verified row, and how many drafts it confirms.

TensorRT-LLM has it as one operator (`mtp_sampling_and_accepted_draft_tokens_op`) with a block for each row. Here a row
is divided into tiles.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.operators import empty_verdict, operator
from spec_kernels.utils import assert_rows_of, launch_on
from spec_kernels.vocabulary import NO_TOKEN, VOCAB_TILE, load_logits, lowest_top, nan_as_largest, num_tiles_of


@triton.jit(do_not_specialize=["num_rows"])
def _tops_of_tiles(
    tops_ptr: tl.tensor,
    top_ids_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    num_rows: tl.tensor,
    vocab_size: tl.tensor,
    request_stride: tl.tensor,
    row_stride: tl.tensor,
    VOCAB_TILE: tl.constexpr,
) -> None:
    """Finds the top of one vocabulary tile of one row."""
    row = tl.program_id(0)
    tile = tl.program_id(1)
    ids = tile * VOCAB_TILE + tl.arange(0, VOCAB_TILE)
    row_ptr = logits_ptr + (row // num_rows).to(tl.int64) * request_stride + row % num_rows * row_stride
    top, top_id = lowest_top(nan_as_largest(load_logits(row_ptr, ids, vocab_size)), ids, 0)
    out = row * tl.num_programs(1) + tile
    tl.store(tops_ptr + out, top)
    tl.store(top_ids_ptr + out, top_id)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _count_matches(
    tokens_ptr: tl.tensor,
    num_emitted_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    top_ids_ptr: tl.tensor,
    draft_tokens_ptr: tl.tensor,
    active_ptr: tl.tensor,
    num_drafts_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_tiles: tl.tensor,
    draft_stride: tl.tensor,
    ALL_OFFERED: tl.constexpr,
    ROW_TILE: tl.constexpr,
    TILE_TILE: tl.constexpr,
) -> None:
    """Writes the argmax of each row of one request, and counts the leading offered drafts that match."""
    request = tl.program_id(0)
    rows = tl.arange(0, ROW_TILE)
    tiles = tl.arange(0, TILE_TILE)[None, :]
    is_row = rows < num_rows
    is_tile = is_row[:, None] & (tiles < num_tiles)
    parts = (request * num_rows + rows)[:, None] * num_tiles + tiles
    tops = tl.load(tops_ptr + parts, mask=is_tile, other=float("-inf"))
    _, tokens = lowest_top(tops, tl.load(top_ids_ptr + parts, mask=is_tile, other=NO_TOKEN), 1)
    tl.store(tokens_ptr + request * num_rows + rows, tokens, mask=is_row)

    draft_ptrs = draft_tokens_ptr + request.to(tl.int64) * draft_stride + rows
    drafts = tl.load(draft_ptrs, mask=rows < num_rows - 1, other=-1)
    num_accepted = tl.min(tl.where(is_row & (tokens != drafts), rows, ROW_TILE), 0)
    if not ALL_OFFERED:
        num_accepted = tl.minimum(num_accepted, tl.load(num_drafts_ptr + request).to(tl.int32))
    is_active = tl.load(active_ptr + request) != 0
    tl.store(num_emitted_ptr + request, tl.where(is_active, num_accepted + 1, 0))


def tops_of_tiles(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the top logit of each vocabulary tile of each row [batch * N, num_tiles], and its token id.

    Args:
        logits: [batch, N, vocab]; the launch is on the current device.
    """
    batch, num_rows, vocab_size = logits.shape
    num_tiles = num_tiles_of(vocab_size, VOCAB_TILE)
    tops = torch.empty((batch * num_rows, num_tiles), dtype=torch.float32, device=logits.device)
    top_ids = torch.empty_like(tops, dtype=torch.int32)
    _tops_of_tiles[(batch * num_rows, num_tiles)](
        tops, top_ids, logits, num_rows, vocab_size, logits.stride(0), logits.stride(1), VOCAB_TILE=VOCAB_TILE
    )
    return tops, top_ids


@operator("strict_accept")
def strict_accept(
    logits: torch.Tensor, draft_tokens: torch.Tensor, active: torch.Tensor, num_drafts: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the argmax of each row in float32, ties to the lowest id, and 1 + the number of leading offered drafts equal
    to it.

    Args:
        logits: [batch, N, vocab] float32, float16 or bfloat16; row j judges draft j.
        draft_tokens: [batch, N - 1] int64, of any row stride.
        active: [batch] bool.
        num_drafts: [batch] int64, the number of drafts that each request offers; None if all are offered.

    Returns:
        The tokens [batch, N], junk from column `num_emitted` on, and `num_emitted` [batch]: 1 to N, or 0 if inactive.
    """
    batch, num_rows, _ = logits.shape
    assert_rows_of(draft_tokens, batch, num_rows - 1)
    assert_rows_of(active, batch)
    if num_drafts is not None:
        assert_rows_of(num_drafts, batch)
    assert logits.stride(2) == 1
    tokens, num_emitted = empty_verdict(logits)
    with launch_on(logits):
        tops, top_ids = tops_of_tiles(logits)
        _count_matches[(batch,)](
            tokens,
            num_emitted,
            tops,
            top_ids,
            draft_tokens,
            active,
            active if num_drafts is None else num_drafts,
            num_rows,
            tops.shape[1],
            draft_tokens.stride(0),
            ALL_OFFERED=num_drafts is None,
            ROW_TILE=triton.next_power_of_2(num_rows),
            TILE_TILE=triton.next_power_of_2(tops.shape[1]),
        )
    return tokens, num_emitted
