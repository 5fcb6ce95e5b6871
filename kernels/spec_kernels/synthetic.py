"""Acceptance at given rates, for speed studies: one draw decides a request's round. Logits are still read in full."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.noise import USE_SYNTHETIC, round_key, uniform
from spec_kernels.operators import empty_verdict, operator
from spec_kernels.strict import tops_of_tiles
from spec_kernels.utils import assert_rows_of, launch_on
from spec_kernels.vocabulary import NO_TOKEN, lowest_top


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _accept_at_rates(
    tokens_ptr: tl.tensor,
    num_emitted_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    top_ids_ptr: tl.tensor,
    draft_tokens_ptr: tl.tensor,
    rates_ptr: tl.tensor,
    active_ptr: tl.tensor,
    slot_ids_ptr: tl.tensor,
    slot_seeds_ptr: tl.tensor,
    kv_lens_ptr: tl.tensor,
    num_drafts_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_tiles: tl.tensor,
    draft_stride: tl.tensor,
    ALL_OFFERED: tl.constexpr,
    ROW_TILE: tl.constexpr,
    TILE_TILE: tl.constexpr,
) -> None:
    """Draws for one request, and writes the argmax of the row reached after the accepted drafts."""
    request = tl.program_id(0)
    rows = tl.arange(0, ROW_TILE)
    seed = tl.load(slot_seeds_ptr + tl.load(slot_ids_ptr + request))
    kv_len = tl.load(kv_lens_ptr + request)
    draw = uniform(round_key(seed, kv_len, tl.zeros_like(kv_len), USE_SYNTHETIC))
    is_draft = rows < num_rows - 1
    rates = tl.load(rates_ptr + rows, mask=is_draft, other=0.0)
    passed = is_draft & (draw < rates)
    if not ALL_OFFERED:
        passed = passed & (rows < tl.load(num_drafts_ptr + request))
    num_accepted = tl.sum(passed.to(tl.int32), 0)

    tiles = tl.arange(0, TILE_TILE)
    parts = (request * num_rows + num_accepted) * num_tiles + tiles
    tops = tl.load(tops_ptr + parts, mask=tiles < num_tiles, other=float("-inf"))
    _, last = lowest_top(tops, tl.load(top_ids_ptr + parts, mask=tiles < num_tiles, other=NO_TOKEN), 0)
    drafts = tl.load(draft_tokens_ptr + request.to(tl.int64) * draft_stride + rows, mask=is_draft, other=0)
    tokens = tl.where(is_draft & (rows != num_accepted), drafts, last.to(tl.int64))
    tl.store(tokens_ptr + request * num_rows + rows, tokens, mask=rows < num_rows)
    is_active = tl.load(active_ptr + request) != 0
    tl.store(num_emitted_ptr + request, tl.where(is_active, num_accepted + 1, 0))


@operator("synthetic_accept")
def synthetic_accept(
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    rates: torch.Tensor,
    active: torch.Tensor,
    slot_ids: torch.Tensor,
    slot_seeds: torch.Tensor,
    kv_lens: torch.Tensor,
    num_drafts: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept as many drafts as there are rates above the round's draw, but no more than are offered.

    Then emit the argmax of the row reached. Returns tokens [batch, N] and `num_emitted` [batch], 0 if inactive.

    Args:
        logits: [batch, N, vocab] float32, float16 or bfloat16.
        draft_tokens: [batch, N - 1] int64, of any row stride.
        rates: [N - 1 or more] float64, not increasing.
        active: [batch] bool.
        slot_ids: [batch] int64; with `slot_seeds` [num_slots + 1] int64 and `kv_lens` [batch] int64 they key the draw.
        num_drafts: [batch] int64, the number of drafts that each request offers; None if all are offered.
    """
    batch, num_rows, _ = logits.shape
    assert_rows_of(draft_tokens, batch, num_rows - 1)
    for tensor in (active, slot_ids, kv_lens):
        assert_rows_of(tensor, batch)
    assert rates.shape[0] >= num_rows - 1
    tokens, num_emitted = empty_verdict(logits)
    with launch_on(logits):
        tops, top_ids = tops_of_tiles(logits)
        _accept_at_rates[(batch,)](
            tokens,
            num_emitted,
            tops,
            top_ids,
            draft_tokens,
            rates,
            active,
            slot_ids,
            slot_seeds,
            kv_lens,
            kv_lens if num_drafts is None else num_drafts,
            num_rows,
            tops.shape[1],
            draft_tokens.stride(0),
            ALL_OFFERED=num_drafts is None,
            ROW_TILE=triton.next_power_of_2(num_rows),
            TILE_TILE=triton.next_power_of_2(tops.shape[1]),
        )
    return tokens, num_emitted
