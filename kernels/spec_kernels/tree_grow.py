"""Grows EAGLE-2's tree (arXiv 2406.16858): one kernel adds a level and chooses its branches, another chooses the rows.

In torch a level takes a sort and a dozen small operators, and so does the choice of rows at the end.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.operators import operator
from spec_kernels.ordering import TAKEN, in_order, place_of
from spec_kernels.utils import assert_rows_of, assert_whole, launch_on
from spec_kernels.vocabulary import nan_as_largest

_NUMBERS = 4096
"""The most elements of hidden states that a program gathers, for up to 16 branches."""

_COUNTED = 128
"""Up to this number of drafts, each is compared with all others."""


@triton.jit(do_not_specialize=["num_found", "num_before"])
def _choose_branches(
    pool_tokens_ptr: tl.tensor,
    pool_scores_ptr: tl.tensor,
    pool_parents_ptr: tl.tensor,
    branch_tokens_ptr: tl.tensor,
    came_from_ptr: tl.tensor,
    numbers_ptr: tl.tensor,
    branch_scores_ptr: tl.tensor,
    gathered_ptr: tl.tensor,
    found_tokens_ptr: tl.tensor,
    log_probs_ptr: tl.tensor,
    numbers_before_ptr: tl.tensor,
    scores_before_ptr: tl.tensor,
    hidden_ptr: tl.tensor,
    num_found: tl.tensor,
    num_before: tl.tensor,
    pool_stride: tl.tensor,
    hidden_stride: tl.tensor,
    IS_FIRST: tl.constexpr,
    TOPK: tl.constexpr,
    BRANCH_TILE: tl.constexpr,
    FOUND_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Adds a request's drafts of a level to the pool, chooses its branches and gathers their parents' hidden states.

    Each program gathers some channels; the first one also writes everything else.
    """
    request, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    found = tl.arange(0, FOUND_TILE)
    is_found = found < num_found
    scores = tl.load(log_probs_ptr + request * num_found + found, mask=is_found, other=0.0)
    parents = tl.full((FOUND_TILE,), -1, tl.int64)
    if not IS_FIRST:
        before = request * TOPK + found // TOPK
        scores += tl.load(scores_before_ptr + before, mask=is_found, other=0.0)
        parents = tl.load(numbers_before_ptr + before, mask=is_found, other=-1)

    order = tl.where(is_found, in_order(nan_as_largest(scores), found), TAKEN)
    branches = tl.arange(0, BRANCH_TILE)
    chosen = tl.zeros((BRANCH_TILE,), tl.int32)
    for branch in range(TOPK):
        best = tl.max(order, 0)
        order = tl.where(order == best, TAKEN, order)
        chosen = tl.where(branches == branch, place_of(best).to(tl.int32), chosen)
    is_branch = branches < TOPK
    came_from = chosen // TOPK
    if chunk == 0:
        pool = request * pool_stride + num_before + found
        tokens = tl.load(found_tokens_ptr + request * num_found + found, mask=is_found, other=0)
        tl.store(pool_tokens_ptr + pool, tokens, mask=is_found)
        tl.store(pool_scores_ptr + pool, scores, mask=is_found)
        tl.store(pool_parents_ptr + pool, parents, mask=is_found)
        out = request * TOPK + branches
        place = request * num_found + chosen
        tl.store(branch_tokens_ptr + out, tl.load(found_tokens_ptr + place, mask=is_branch, other=0), mask=is_branch)
        tl.store(came_from_ptr + out, came_from.to(tl.int64), mask=is_branch)
        tl.store(numbers_ptr + out, (chosen + num_before).to(tl.int64), mask=is_branch)
        score = tl.load(log_probs_ptr + place, mask=is_branch, other=0.0)
        if not IS_FIRST:
            score += tl.load(scores_before_ptr + request * TOPK + came_from, mask=is_branch, other=0.0)
        tl.store(branch_scores_ptr + out, score, mask=is_branch)

    channels = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = is_branch[:, None] & (channels < hidden_stride)[None, :]
    rows = request * (num_found // TOPK) + came_from
    numbers = tl.load(hidden_ptr + rows[:, None] * hidden_stride + channels[None, :], mask=mask, other=0.0)
    places = request * TOPK + branches
    tl.store(gathered_ptr + places[:, None] * hidden_stride + channels[None, :], numbers, mask=mask)


@operator(
    "choose_branches",
    mutates_args=(
        *("pool_tokens", "pool_scores", "pool_parents"),
        *("branch_tokens", "came_from", "numbers", "branch_scores", "gathered"),
    ),
)
def choose_branches(
    pool_tokens: torch.Tensor,
    pool_scores: torch.Tensor,
    pool_parents: torch.Tensor,
    branch_tokens: torch.Tensor,
    came_from: torch.Tensor,
    numbers: torch.Tensor,
    branch_scores: torch.Tensor,
    gathered: torch.Tensor,
    found_tokens: torch.Tensor,
    log_probs: torch.Tensor,
    numbers_before: torch.Tensor | None,
    scores_before: torch.Tensor | None,
    hidden: torch.Tensor,
    num_before: int,
) -> None:
    """Do what `choose_branches_reference` does, in one launch. All tensors are contiguous, and int64 or float32, except
    `hidden` and `gathered`, which have the model's dtype."""
    batch, topk = branch_tokens.shape
    num_found, hidden_size = found_tokens[0].numel(), hidden.shape[2]
    assert_whole((pool_tokens, pool_scores, pool_parents), *pool_tokens.shape)
    assert_whole((branch_tokens, came_from, numbers, branch_scores), batch, topk)
    assert_whole((hidden,), batch, num_found // topk, hidden_size)
    assert_whole((gathered,), batch * topk, hidden_size)
    assert found_tokens.is_contiguous() and log_probs.is_contiguous()
    branch_tile = triton.next_power_of_2(topk)
    chunk = min(max(_NUMBERS // branch_tile, 256), triton.next_power_of_2(hidden_size))
    with launch_on(hidden):
        _choose_branches[(batch, triton.cdiv(hidden_size, chunk))](
            pool_tokens,
            pool_scores,
            pool_parents,
            branch_tokens,
            came_from,
            numbers,
            branch_scores,
            gathered,
            found_tokens,
            log_probs,
            found_tokens if numbers_before is None else numbers_before,
            log_probs if scores_before is None else scores_before,
            hidden,
            num_found,
            num_before,
            pool_tokens.stride(0),
            hidden_size,
            IS_FIRST=numbers_before is None or scores_before is None,
            TOPK=topk,
            BRANCH_TILE=branch_tile,
            FOUND_TILE=triton.next_power_of_2(num_found),
            CHUNK=chunk,
        )


@triton.jit(do_not_specialize=["num_found", "num_before", "num_drafts"])
def _choose_rows(
    tokens_ptr: tl.tensor,
    parents_ptr: tl.tensor,
    row_of_ptr: tl.tensor,
    pool_tokens_ptr: tl.tensor,
    pool_scores_ptr: tl.tensor,
    pool_parents_ptr: tl.tensor,
    found_tokens_ptr: tl.tensor,
    log_probs_ptr: tl.tensor,
    numbers_before_ptr: tl.tensor,
    scores_before_ptr: tl.tensor,
    num_found: tl.tensor,
    num_before: tl.tensor,
    num_drafts: tl.tensor,
    pool_stride: tl.tensor,
    IS_FIRST: tl.constexpr,
    TOPK: tl.constexpr,
    TILE: tl.constexpr,
    COUNTED: tl.constexpr,
) -> None:
    """Chooses the rows of one request among the drafts of its pool and those of the last level, which come after these.

    If drafts are few, all pairs are compared. Else the best draft that is left is searched repeatedly.
    """
    request = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, TILE)
    in_pool, is_draft = place < num_before, place < num_before + num_found
    is_found = is_draft & (place >= num_before)
    pool, last = request * pool_stride + place, place - num_before
    found = request * num_found + last
    scores = tl.load(log_probs_ptr + found, mask=is_found, other=0.0)
    parents = tl.full((TILE,), -1, tl.int64)
    if not IS_FIRST:
        before = request * TOPK + last // TOPK
        scores += tl.load(scores_before_ptr + before, mask=is_found, other=0.0)
        parents = tl.load(numbers_before_ptr + before, mask=is_found, other=-1)
        parents = tl.where(in_pool, tl.load(pool_parents_ptr + pool, mask=in_pool, other=-1), parents)
        scores = tl.where(in_pool, tl.load(pool_scores_ptr + pool, mask=in_pool, other=0.0), scores)
    order = tl.where(is_draft, in_order(nan_as_largest(scores), place), TAKEN)
    if COUNTED:
        row = 1 + tl.sum((order[None, :] > order[:, None]).to(tl.int32), 1)
        row = tl.where(is_draft & (row <= num_drafts), row, 0)
    else:
        row = tl.full((TILE,), 0, tl.int32)
        for best in range(num_drafts):
            is_best = order == tl.max(order, 0)
            row = tl.where(is_best, best + 1, row)
            order = tl.where(is_best, TAKEN, order)
    is_chosen = row > 0

    # Another thread knows the row of a parent, so rows go through memory.
    rows_ptr = row_of_ptr + request * TILE
    tl.store(rows_ptr + place, row)
    tl.debug_barrier()
    has_parent = is_chosen & (parents >= 0)
    below = tl.load(rows_ptr + parents, mask=has_parent, other=0, cache_modifier=".cg")
    tokens = tl.load(found_tokens_ptr + found, mask=is_found, other=0)
    tokens = tl.where(in_pool, tl.load(pool_tokens_ptr + pool, mask=in_pool, other=0), tokens)
    tl.store(tokens_ptr + request * num_drafts + row - 1, tokens, mask=is_chosen)
    out = parents_ptr + request * (num_drafts + 1)
    tl.store(out + row, below.to(tl.int64), mask=is_chosen)
    tl.store(out + place, tl.zeros((TILE,), tl.int64), mask=place == 0)


@operator("choose_rows", mutates_args=("tokens", "parents"))
def choose_rows(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    pool_tokens: torch.Tensor,
    pool_scores: torch.Tensor,
    pool_parents: torch.Tensor,
    found_tokens: torch.Tensor,
    log_probs: torch.Tensor,
    numbers_before: torch.Tensor | None,
    scores_before: torch.Tensor | None,
    num_before: int,
) -> None:
    """Do what `choose_rows_reference` does, in one launch; all tensors are contiguous, and int64 or float32."""
    batch, num_drafts = tokens.shape
    assert_rows_of(parents, batch, num_drafts + 1)
    num_found, topk = found_tokens[0].numel(), found_tokens.shape[2]
    total = num_before + num_found
    assert num_drafts <= total <= pool_tokens.shape[1]
    for tensor in (tokens, parents, pool_tokens, pool_scores, pool_parents, found_tokens, log_probs):
        assert tensor.is_contiguous()
    is_first = numbers_before is None or scores_before is None
    tile = triton.next_power_of_2(total)
    row_of = torch.empty((batch, tile), dtype=torch.int32, device=tokens.device)
    with launch_on(tokens):
        _choose_rows[(batch,)](
            tokens,
            parents,
            row_of,
            pool_tokens,
            pool_scores,
            pool_parents,
            found_tokens,
            log_probs,
            found_tokens if numbers_before is None else numbers_before,
            log_probs if scores_before is None else scores_before,
            num_found,
            num_before,
            num_drafts,
            pool_tokens.stride(0),
            IS_FIRST=is_first,
            TOPK=topk,
            TILE=tile,
            COUNTED=tile <= _COUNTED,
        )
