"""Draws the target's next token after each row of a tree, by an exponential race with the lab's noise."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.gumbel import finish_race, race_of_tile
from spec_kernels.noise import USE_EMIT, round_key
from spec_kernels.operators import operator
from spec_kernels.tree_walk import follow_chosen
from spec_kernels.utils import assert_rows_of, launch_on
from spec_kernels.vocabulary import RACE_TILE, load_logits, num_tiles_of, scaled_by


@triton.jit(do_not_specialize=["num_rows"])
def _race_of_rows(
    scores_ptr: tl.tensor,
    score_ids_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    slot_ids_ptr: tl.tensor,
    slot_seeds_ptr: tl.tensor,
    kv_lens_ptr: tl.tensor,
    temperature: tl.tensor,
    num_rows: tl.tensor,
    vocab_size: tl.tensor,
    request_stride: tl.tensor,
    row_stride: tl.tensor,
    RACE_TILE: tl.constexpr,
) -> None:
    """Races one vocabulary tile of one row."""
    request, row = tl.program_id(0) // num_rows, tl.program_id(0) % num_rows
    ids = tl.program_id(1) * RACE_TILE + tl.arange(0, RACE_TILE)
    row_ptr = logits_ptr + request.to(tl.int64) * request_stride + row * row_stride
    scaled = scaled_by(load_logits(row_ptr, ids, vocab_size), temperature)
    seed, kv_len = tl.load(slot_seeds_ptr + tl.load(slot_ids_ptr + request)), tl.load(kv_lens_ptr + request)
    score, winner = race_of_tile(scaled, round_key(seed, kv_len, row.to(tl.int64), USE_EMIT), ids)
    out = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(scores_ptr + out, score)
    tl.store(score_ids_ptr + out, winner)


@operator("draw_rows")
def draw_rows(
    logits: torch.Tensor,
    slot_ids: torch.Tensor,
    slot_seeds: torch.Tensor,
    kv_lens: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """Draw a token after each row from softmax(logits / temperature): [batch, N] int64.

    Args:
        logits: [batch, N, vocab] float32, float16 or bfloat16.
        slot_ids: [batch] int64. A row's noise depends on its place, and on its request's seed and length.
        slot_seeds: [num_slots + 1] int64.
        kv_lens: [batch] int64.
        temperature: above 0. For top-k and top-p, pass the truncated, scaled logits and temperature 1.
    """
    batch, num_rows, vocab_size = logits.shape
    assert temperature > 0, "a greedy walk follows the argmax"
    for vector in (slot_ids, kv_lens):
        assert_rows_of(vector, batch)
    assert logits.stride(2) == 1
    num_tiles = num_tiles_of(vocab_size, RACE_TILE)
    scores = torch.empty((batch * num_rows, num_tiles), dtype=torch.float64, device=logits.device)
    score_ids = torch.empty_like(scores, dtype=torch.int32)
    chosen = torch.empty((batch, num_rows), dtype=torch.int64, device=logits.device)
    with launch_on(logits):
        _race_of_rows[(batch * num_rows, num_tiles)](
            scores,
            score_ids,
            logits,
            slot_ids,
            slot_seeds,
            kv_lens,
            temperature,
            num_rows,
            vocab_size,
            *logits.stride()[:2],
            RACE_TILE=RACE_TILE,
        )
        finish_race[(batch * num_rows,)](
            chosen, scores, score_ids, num_tiles, TILE_TILE=triton.next_power_of_2(num_tiles)
        )
    return chosen


def draw_tree(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    active: torch.Tensor,
    slot_ids: torch.Tensor,
    slot_seeds: torch.Tensor,
    kv_lens: torch.Tensor,
    temperature: float | None,
    depth: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw a token after each row, follow these tokens, and return tokens, num_emitted and path as in `follow_chosen`.

    `temperature`: None if the logits are already scaled.
    """
    chosen = draw_rows(logits, slot_ids, slot_seeds, kv_lens, 1.0 if temperature is None else temperature)
    return follow_chosen(chosen, drafts, parents, active, depth)
