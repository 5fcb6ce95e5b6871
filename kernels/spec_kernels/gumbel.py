"""Draws tokens from logits: the target's next ones, or a draft, with the index of the step on the device.

Of a draft the kernel also writes the processed logits, like vLLM's `gumbel_sample`. In torch, indexing with a column
that is a tensor costs a copy. The draw is an exponential race with the lab's noise, which has the same distribution as
the Gumbel trick.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.noise import USE_DRAFT, USE_EMIT, arrival, round_key
from spec_kernels.operators import operator
from spec_kernels.utils import assert_rows_of, launch_on
from spec_kernels.vocabulary import (
    NO_TOKEN,
    RACE_TILE,
    finite_or_zero,
    load_logits,
    lowest_top,
    num_tiles_of,
    scaled_by,
)


@triton.jit
def _race_of_tile(scaled: tl.tensor, key: tl.tensor, ids: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the score of a tile's winner, comparable between tiles, and the winner."""
    # Weights are relative to the tile's own top, so one pass is enough. The score, a logarithm, adds the top again.
    weighed = tl.where(scaled == scaled, scaled, float("-inf"))
    top = tl.max(weighed, 0)
    weights = tl.exp(weighed - finite_or_zero(top))
    ratio, winner = lowest_top(tl.where(weights > 0, weights, 0.0) / arrival(key, ids), ids, 0)
    score = tl.log(tl.where(ratio > 0, ratio, 1.0)) + top
    return tl.where(ratio > 0, score, float("-inf")), winner


@triton.jit(do_not_specialize=["num_rows"])
def _race_in_tiles(
    scores_ptr: tl.tensor,
    score_ids_ptr: tl.tensor,
    kept_logits_ptr: tl.tensor | None,
    logits_ptr: tl.tensor,
    slot_ids_ptr: tl.tensor,
    slot_seeds_ptr: tl.tensor,
    kv_lens_ptr: tl.tensor,
    column_ptr: tl.tensor | None,
    temperature: tl.tensor,
    num_rows: tl.tensor,
    vocab_size: tl.tensor,
    request_stride: tl.tensor,
    row_stride: tl.tensor,
    kept_slot_stride: tl.tensor,
    kept_column_stride: tl.tensor,
    RACE_TILE: tl.constexpr,
) -> None:
    """Races one vocabulary tile of one row, and writes its winner and the winner's score. A row that is kept is a
    drafter's, and any other the target's."""
    request, row = (tl.program_id(0) // num_rows).to(tl.int64), (tl.program_id(0) % num_rows).to(tl.int64)
    ids = tl.program_id(1) * RACE_TILE + tl.arange(0, RACE_TILE)
    logits = load_logits(logits_ptr + request * request_stride + row * row_stride, ids, vocab_size)
    scaled = scaled_by(logits, temperature)
    slot, kv_len = tl.load(slot_ids_ptr + request), tl.load(kv_lens_ptr + request)
    seed = tl.load(slot_seeds_ptr + slot)
    if kept_logits_ptr is None:
        key = round_key(seed, kv_len, row, USE_EMIT)
    else:
        column = tl.load(column_ptr)
        kept_ptrs = kept_logits_ptr + slot * kept_slot_stride + column * kept_column_stride + ids
        tl.store(kept_ptrs, scaled, mask=ids < vocab_size)
        key = round_key(seed, kv_len, column, USE_DRAFT)
    score, winner = _race_of_tile(scaled, key, ids)
    out = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(scores_ptr + out, score)
    tl.store(score_ids_ptr + out, winner)


@triton.jit(do_not_specialize=["num_tiles"])
def _finish_race(
    tokens_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    score_ids_ptr: tl.tensor,
    num_tiles: tl.tensor,
    TILE_TILE: tl.constexpr,
) -> None:
    """Finds the winner of one row; token 0 if no token has a weight, which can happen on a padded row."""
    row = tl.program_id(0)
    tiles = tl.arange(0, TILE_TILE)
    is_tile = tiles < num_tiles
    scores = tl.load(scores_ptr + row * num_tiles + tiles, mask=is_tile, other=float("-inf"))
    winners = tl.load(score_ids_ptr + row * num_tiles + tiles, mask=is_tile, other=NO_TOKEN)
    _, token = lowest_top(scores, winners, 0)
    tl.store(tokens_ptr + row, token)


def draw(
    logits: torch.Tensor,
    slot_ids: torch.Tensor,
    slot_seeds: torch.Tensor,
    kv_lens: torch.Tensor,
    temperature: float,
    kept_logits: torch.Tensor | None = None,
    column: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw a token [batch, N] from each row of logits [batch, N, vocab]; the rest is as in `sample_draft`. Without
    `kept_logits`, a row's place is the key of its noise, not `column`."""
    batch, num_rows, vocab_size = logits.shape
    assert temperature > 0, "greedy tokens are an argmax"
    for vector in (slot_ids, kv_lens):
        assert_rows_of(vector, batch)
    assert logits.stride(2) == 1
    num_tiles = num_tiles_of(vocab_size, RACE_TILE)
    scores = torch.empty((batch * num_rows, num_tiles), dtype=torch.float64, device=logits.device)
    score_ids = torch.empty_like(scores, dtype=torch.int32)
    tokens = torch.empty((batch, num_rows), dtype=torch.int64, device=logits.device)
    with launch_on(logits):
        _race_in_tiles[(batch * num_rows, num_tiles)](
            scores,
            score_ids,
            kept_logits,
            logits,
            slot_ids,
            slot_seeds,
            kv_lens,
            column,
            temperature,
            num_rows,
            vocab_size,
            *logits.stride()[:2],
            *((0, 0) if kept_logits is None else kept_logits.stride()[:2]),
            RACE_TILE=RACE_TILE,
        )
        _finish_race[(len(scores),)](tokens, scores, score_ids, num_tiles, TILE_TILE=triton.next_power_of_2(num_tiles))
    return tokens


@operator("sample_draft", mutates_args=("kept_logits",))
def sample_draft(
    kept_logits: torch.Tensor,
    logits: torch.Tensor,
    slot_ids: torch.Tensor,
    slot_seeds: torch.Tensor,
    kv_lens: torch.Tensor,
    column: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """Draw a token for each request from softmax(logits / temperature), and keep logits / temperature for verification.

    Returns the tokens [batch].

    Args:
        kept_logits: [num_slots + 1, K, vocab] float32, written at (`slot_ids`, `column`). Padded rows have the scratch
            slot, the last.
        logits: [batch, vocab] float32, float16 or bfloat16; -inf outside the draft vocabulary.
        slot_ids: [batch] int64.
        slot_seeds: [num_slots + 1] int64 request seed of each slot.
        kv_lens: [batch] int64 length L of each request in the round that will verify the draft.
        column: [1] int64 index of the draft in the round, from 0.
        temperature: above 0.
    """
    assert_rows_of(column, 1)
    assert_rows_of(kept_logits, *kept_logits.shape[:2], logits.shape[1])
    assert_rows_of(slot_seeds, kept_logits.shape[0])
    assert kept_logits.dtype == torch.float32
    return draw(logits.unsqueeze(1), slot_ids, slot_seeds, kv_lens, temperature, kept_logits, column).squeeze(1)
