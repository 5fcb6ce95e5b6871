"""Rejection sampling of drafts (Leviathan et al., arXiv 2211.17192): accept draft x with probability min(1, p(x) /
q(x)), then draw one token from the residual, or from p after the last draft.

The stages are the same as in vLLM's sampler. First, the softmax's maximum and sum for every tile of the vocabulary.
Second, one program for each request, which walks its drafts. Third, a race over the vocabulary of the row reached, tile
by tile. Fourth, the winner is written after the accepted drafts. The probabilities of a whole row are never written.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.noise import USE_ACCEPT, USE_EMIT, arrival, round_key, uniform
from spec_kernels.operators import empty_verdict, operator
from spec_kernels.softmax import merge_rows, softmax_in_tiles
from spec_kernels.strict import strict_accept
from spec_kernels.utils import assert_rows_of, launch_on, next_power_of_2
from spec_kernels.vocabulary import (
    NO_TOKEN,
    RACE_TILE,
    VOCAB_TILE,
    finite_or_zero,
    load_logits,
    lowest_top,
    num_tiles_of,
    probability,
    scaled_by,
)


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "batch"])
def _walk_drafts(
    tokens_ptr: tl.tensor,
    num_emitted_ptr: tl.tensor,
    num_accepted_ptr: tl.tensor,
    reached_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    draft_tops_ptr: tl.tensor,
    draft_sums_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    draft_logits_ptr: tl.tensor,
    draft_tokens_ptr: tl.tensor,
    active_ptr: tl.tensor,
    slot_ids_ptr: tl.tensor,
    slot_seeds_ptr: tl.tensor,
    kv_lens_ptr: tl.tensor,
    num_drafts_ptr: tl.tensor,
    temperature: tl.tensor,
    batch: tl.tensor,
    num_rows: tl.tensor,
    num_tiles: tl.tensor,
    request_stride: tl.tensor,
    row_stride: tl.tensor,
    draft_request_stride: tl.tensor,
    draft_row_stride: tl.tensor,
    draft_stride: tl.tensor,
    IS_SAMPLED: tl.constexpr,
    ALL_OFFERED: tl.constexpr,
    ROW_TILE: tl.constexpr,
    TILE_TILE: tl.constexpr,
) -> None:
    """Walks the drafts of one request: counts the leading ones that pass, and writes the softmax maximum and sum of the
    row reached, for the target and, if IS_SAMPLED, the drafter."""
    request = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, ROW_TILE)
    is_row = rows < num_rows
    is_draft = rows < num_rows - 1
    drafts = tl.load(draft_tokens_ptr + request * draft_stride + rows, mask=is_draft, other=0)
    tops, totals = merge_rows(tops_ptr, sums_ptr, request * num_rows, rows, is_row, num_tiles, TILE_TILE)
    own_ptrs = logits_ptr + request * request_stride + rows * row_stride + drafts
    own = scaled_by(tl.load(own_ptrs, mask=is_row, other=0.0).to(tl.float32), temperature)
    p = probability(own, tops, tl.where(is_row, totals, 1.0))
    q = tl.full((ROW_TILE,), 1.0, tl.float32)
    if IS_SAMPLED:
        first = request * (num_rows - 1)
        q_tops, q_totals = merge_rows(draft_tops_ptr, draft_sums_ptr, first, rows, is_draft, num_tiles, TILE_TILE)
        q_ptrs = draft_logits_ptr + request * draft_request_stride + rows * draft_row_stride + drafts
        q_own = tl.load(q_ptrs, mask=is_draft, other=0.0).to(tl.float32)
        q = probability(q_own, q_tops, tl.where(is_draft, q_totals, 1.0))

    seed = tl.load(slot_seeds_ptr + tl.load(slot_ids_ptr + request))
    draws = uniform(round_key(seed, tl.load(kv_lens_ptr + request), rows.to(tl.int64), USE_ACCEPT))
    is_likelier = p >= q
    ratio = tl.where(is_likelier, (p > 0).to(tl.float32), tl.div_rn(p, tl.where(is_likelier, 1.0, q)))
    passes = is_draft & (draws < ratio.to(tl.float64))
    if not ALL_OFFERED:
        passes = passes & (rows < tl.load(num_drafts_ptr + request))
    num_accepted = tl.min(tl.where(passes, ROW_TILE, rows), 0)

    tl.store(tokens_ptr + request * num_rows + rows, drafts, mask=is_draft)
    tl.store(num_accepted_ptr + request, num_accepted)
    is_active = tl.load(active_ptr + request) != 0
    tl.store(num_emitted_ptr + request, tl.where(is_active, num_accepted + 1, 0))
    is_reached = rows == num_accepted
    tl.store(reached_ptr + request, tl.sum(tl.where(is_reached, finite_or_zero(tops), 0.0), 0))
    tl.store(reached_ptr + batch + request, tl.sum(tl.where(is_reached, totals, 0.0), 0))
    if IS_SAMPLED:
        tl.store(reached_ptr + 2 * batch + request, tl.sum(tl.where(is_reached, finite_or_zero(q_tops), 0.0), 0))
        tl.store(reached_ptr + 3 * batch + request, tl.sum(tl.where(is_reached, q_totals, 0.0), 0))


@triton.jit(do_not_specialize=["num_rows", "batch"])
def _race_in_tiles(
    ratios_ptr: tl.tensor,
    winners_ptr: tl.tensor,
    num_accepted_ptr: tl.tensor,
    reached_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    draft_logits_ptr: tl.tensor,
    draft_tokens_ptr: tl.tensor,
    slot_ids_ptr: tl.tensor,
    slot_seeds_ptr: tl.tensor,
    kv_lens_ptr: tl.tensor,
    num_drafts_ptr: tl.tensor,
    temperature: tl.tensor,
    batch: tl.tensor,
    num_rows: tl.tensor,
    vocab_size: tl.tensor,
    request_stride: tl.tensor,
    row_stride: tl.tensor,
    draft_request_stride: tl.tensor,
    draft_row_stride: tl.tensor,
    draft_stride: tl.tensor,
    IS_SAMPLED: tl.constexpr,
    ALL_OFFERED: tl.constexpr,
    RACE_TILE: tl.constexpr,
) -> None:
    """Races one vocabulary tile of the row reached: finds the winner by max(p - q, 0), and the winner by p in case that
    is 0 everywhere."""
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(num_accepted_ptr + request)
    ids = tl.program_id(1) * RACE_TILE + tl.arange(0, RACE_TILE)
    is_token = ids < vocab_size
    row_ptr = logits_ptr + request * request_stride + row * row_stride
    scaled = scaled_by(load_logits(row_ptr, ids, vocab_size), temperature)
    p = probability(scaled, tl.load(reached_ptr + request), tl.load(reached_ptr + batch + request))
    is_draft = row < num_rows - 1
    if not ALL_OFFERED:
        is_draft = row < tl.load(num_drafts_ptr + request)
    if IS_SAMPLED:
        q_row_ptr = draft_logits_ptr + request * draft_request_stride + row * draft_row_stride
        q_logits = tl.load(q_row_ptr + ids, mask=is_token & is_draft, other=float("-inf")).to(tl.float32)
        q_total = tl.where(is_draft, tl.load(reached_ptr + 3 * batch + request), 1.0)
        q = probability(q_logits, tl.load(reached_ptr + 2 * batch + request), q_total)
    else:
        draft = tl.load(draft_tokens_ptr + request * draft_stride + row, mask=is_draft, other=-1)
        q = (ids == draft).to(tl.float32)
    left = p - q

    seed = tl.load(slot_seeds_ptr + tl.load(slot_ids_ptr + request))
    arrivals = arrival(round_key(seed, tl.load(kv_lens_ptr + request), row.to(tl.int64), USE_EMIT), ids)
    # `where` makes NaN of a padded row lose too.
    ratio, winner = lowest_top(tl.where(left > 0, left, 0.0) / arrivals, ids, 0)
    p_ratio, p_winner = lowest_top(tl.where(p > 0, p, 0.0) / arrivals, ids, 0)
    out = (request * tl.num_programs(1) + tl.program_id(1)) * 2
    tl.store(ratios_ptr + out, ratio)
    tl.store(ratios_ptr + out + 1, p_ratio)
    tl.store(winners_ptr + out, winner)
    tl.store(winners_ptr + out + 1, p_winner)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _put_last(
    tokens_ptr: tl.tensor,
    num_accepted_ptr: tl.tensor,
    ratios_ptr: tl.tensor,
    winners_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_tiles: tl.tensor,
    TILE_TILE: tl.constexpr,
) -> None:
    """Writes the last token of one request. It also fills the bonus column if that is not reached, since nothing else
    does."""
    request = tl.program_id(0)
    tiles = tl.arange(0, TILE_TILE)
    is_tile = tiles < num_tiles
    parts = (request * num_tiles + tiles) * 2
    ratios = tl.load(ratios_ptr + parts, mask=is_tile, other=-1.0)
    ratio, winner = lowest_top(ratios, tl.load(winners_ptr + parts, mask=is_tile, other=NO_TOKEN), 0)
    p_ratios = tl.load(ratios_ptr + parts + 1, mask=is_tile, other=-1.0)
    _, p_winner = lowest_top(p_ratios, tl.load(winners_ptr + parts + 1, mask=is_tile, other=NO_TOKEN), 0)
    last = tl.where(ratio > 0, winner, p_winner)
    tl.store(tokens_ptr + request * num_rows + tl.load(num_accepted_ptr + request), last)
    tl.store(tokens_ptr + request * num_rows + num_rows - 1, last)


@operator("rejection_sample")
def rejection_sample(
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor | None,
    active: torch.Tensor,
    slot_ids: torch.Tensor,
    slot_seeds: torch.Tensor,
    kv_lens: torch.Tensor,
    temperature: float | None,
    num_drafts: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept leading drafts by p / q, and draw the token after them from max(p - q, 0). Draw it from p after the last
    draft, or if max(p - q, 0) is 0 everywhere.

    p is softmax(logits / temperature), q is softmax(draft_logits), both in float32. Without `draft_logits`, q is
    one-hot. After the offered drafts q is 0, so the token there is drawn from p. Temperature 0 is `strict_accept`. For
    top-k and top-p, pass the truncated, scaled logits.

    Args:
        logits: [batch, K + 1, vocab] float32, float16 or bfloat16.
        draft_tokens: [batch, K] int64 of the vocabulary, of any row stride.
        draft_logits: [batch, K, vocab] from which the drafts were sampled, temperature included; None for a one-hot q.
        active: [batch] bool.
        slot_ids: [batch] int64.
        slot_seeds: [num_slots + 1] int64 request seed of each slot.
        kv_lens: [batch] int64 length L of each request at the start of the round.
        temperature: None if the logits are already scaled.
        num_drafts: [batch] int64, the number of drafts that each request offers, up to K; None if all are offered.

    Returns:
        The tokens [batch, K + 1], junk from column `num_emitted` on, and `num_emitted` [batch]: 1 to K + 1, or 0 if
        inactive.
    """
    if temperature == 0:
        return strict_accept(logits, draft_tokens, active, num_drafts)
    temperature = 1.0 if temperature is None else temperature
    tokens, num_emitted = empty_verdict(logits)
    offered = kv_lens if num_drafts is None else num_drafts
    _check(logits, draft_tokens, draft_logits, (active, slot_ids, kv_lens, offered), slot_seeds)
    batch, num_rows, vocab_size = logits.shape
    is_sampled = draft_logits is not None and num_rows > 1
    q_logits = logits if draft_logits is None else draft_logits
    num_tiles = num_tiles_of(vocab_size, VOCAB_TILE)
    tops, sums, q_tops, q_sums = logits.new_empty((4, batch * num_rows, num_tiles), dtype=torch.float32).unbind()
    reached, num_accepted = logits.new_empty((4, batch), dtype=torch.float32), torch.empty_like(num_emitted)
    strides = (*logits.stride()[:2], *q_logits.stride()[:2], draft_tokens.stride(0))
    draws = (slot_ids, slot_seeds, kv_lens, offered, temperature, batch, num_rows)
    kind = {"IS_SAMPLED": is_sampled, "ALL_OFFERED": num_drafts is None}
    with launch_on(logits):
        softmax_in_tiles(tops, sums, logits, temperature)
        if is_sampled:
            softmax_in_tiles(q_tops, q_sums, q_logits, 1.0)
        _walk_drafts[(batch,)](
            tokens,
            num_emitted,
            num_accepted,
            reached,
            tops,
            sums,
            q_tops,
            q_sums,
            logits,
            q_logits,
            draft_tokens,
            active,
            *draws,
            num_tiles,
            *strides,
            **kind,
            ROW_TILE=next_power_of_2(num_rows),
            TILE_TILE=next_power_of_2(num_tiles),
        )
        _draw_last(tokens, num_accepted, reached, logits, q_logits, draft_tokens, draws, strides, kind)
    return tokens, num_emitted


def _draw_last(
    tokens: torch.Tensor,
    num_accepted: torch.Tensor,
    reached: torch.Tensor,
    logits: torch.Tensor,
    q_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    draws: tuple[torch.Tensor | float, ...],
    strides: tuple[int, ...],
    kind: dict[str, bool],
) -> None:
    """Launch the race over the row reached, and write its winner after the accepted drafts."""
    batch, num_rows, vocab_size = logits.shape
    num_tiles = num_tiles_of(vocab_size, RACE_TILE)
    ratios = logits.new_empty((batch, num_tiles, 2), dtype=torch.float64)
    winners = torch.empty_like(ratios, dtype=torch.int32)
    _race_in_tiles[(batch, num_tiles)](
        ratios,
        winners,
        num_accepted,
        reached,
        logits,
        q_logits,
        draft_tokens,
        *draws,
        vocab_size,
        *strides,
        **kind,
        RACE_TILE=RACE_TILE,
    )
    _put_last[(batch,)](
        tokens, num_accepted, ratios, winners, num_rows, num_tiles, TILE_TILE=next_power_of_2(num_tiles)
    )


def _check(
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor | None,
    vectors: tuple[torch.Tensor, ...],
    slot_seeds: torch.Tensor,
) -> None:
    """Check the kernels' preconditions; `vectors` have an entry for each request."""
    batch, num_rows, vocab_size = logits.shape
    assert_rows_of(draft_tokens, batch, num_rows - 1)
    if draft_logits is not None:
        assert_rows_of(draft_logits, batch, num_rows - 1, vocab_size)
    for vector in vectors:
        assert_rows_of(vector, batch)
    assert logits.stride(2) == 1 and slot_seeds.is_contiguous()
