"""The router of experts. For up to 64 rows, one launch makes the rows' norm, the logits, the choice and the weights,
which are a dozen launches in torch. For more rows, one launch makes only the choice and the weights.

Logits and scores are always float32. Up to 64 rows, a row's logits are summed in a fixed order, and its choice reads no
other row. So its bits do not depend on other rows.

Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) for scores, groups and weights.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from spec_kernels.early import placed, wait_for_inputs
from spec_kernels.norms import normed_by
from spec_kernels.operators import operator
from spec_kernels.ordering import TAKEN, in_order
from spec_kernels.utils import assert_whole, launch_on

MAX_ROUTED_ROWS = 64
"""The most rows for which `route` computes the logits too. For more, a product of torch computes them, since in it the
rows share each read of the gate."""

_FEW_ROWS, _EXPERTS_AT_ONCE = 16, 4


@triton.jit
def _best_groups_only(
    ranked: tl.tensor, EXPERT_TILE: tl.constexpr, NUM_GROUPS: tl.constexpr, NUM_CHOSEN_GROUPS: tl.constexpr
) -> tl.tensor:
    """Replaces scores by -inf outside the best groups: those with the highest sum of their two best experts."""
    groups = tl.arange(0, NUM_GROUPS)
    members = tl.arange(0, EXPERT_TILE // NUM_GROUPS)
    grouped = tl.reshape(ranked, (NUM_GROUPS, EXPERT_TILE // NUM_GROUPS))
    best = tl.argmax(grouped, 1)
    others = tl.where(members[None, :] == best[:, None], float("-inf"), grouped)
    sums = tl.max(grouped, 1) + tl.max(others, 1)
    is_kept = groups < 0
    for _ in tl.static_range(NUM_CHOSEN_GROUPS):
        is_best = groups == tl.argmax(sums, 0)
        is_kept = is_kept | is_best
        sums = tl.where(is_best, float("-inf"), sums)
    return tl.reshape(tl.where(is_kept[:, None], grouped, float("-inf")), (EXPERT_TILE,))


class Rule(NamedTuple):
    """How a row's experts are chosen."""

    NUM_EXPERTS: tl.constexpr
    EXPERT_TILE: tl.constexpr
    NUM_CHOSEN: tl.constexpr
    NUM_GROUPS: tl.constexpr
    NUM_CHOSEN_GROUPS: tl.constexpr
    IS_SIGMOID: tl.constexpr
    IS_RENORMALIZED: tl.constexpr


@triton.jit
def _choose_of_row(
    expert_ids_ptr: tl.tensor,
    routing_weights_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    row: tl.tensor,
    scaling: tl.tensor,
    HAS_BIAS: tl.constexpr,
    rule: Rule,
) -> None:
    """Chooses the experts of one row by taking the highest score repeatedly; ties go to the first."""
    NUM_EXPERTS: tl.constexpr = rule.NUM_EXPERTS
    EXPERT_TILE: tl.constexpr = rule.EXPERT_TILE
    NUM_CHOSEN: tl.constexpr = rule.NUM_CHOSEN
    experts = tl.arange(0, EXPERT_TILE)
    is_expert = experts < NUM_EXPERTS
    # Read past L1, since another program may have just written them.
    logits_ptrs = logits_ptr + row * NUM_EXPERTS + experts
    logits = tl.load(logits_ptrs, mask=is_expert, other=float("-inf"), cache_modifier=".cg")
    if rule.IS_SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        scores = tl.exp(logits - tl.max(logits, 0))
        scores = scores / tl.sum(scores, 0)
    ranked = scores
    if HAS_BIAS:
        ranked += tl.load(bias_ptr + experts, mask=is_expert, other=0.0)
    # A row that is not finite must also choose existing experts.
    ranked = tl.where(is_expert & (ranked == ranked), ranked, float("-inf"))
    if rule.NUM_CHOSEN_GROUPS < rule.NUM_GROUPS:
        ranked = _best_groups_only(ranked, EXPERT_TILE, rule.NUM_GROUPS, rule.NUM_CHOSEN_GROUPS)
    order = in_order(ranked, experts)
    place = tl.full((EXPERT_TILE,), NUM_CHOSEN, tl.int32)
    for choice in tl.static_range(NUM_CHOSEN):
        is_it = order == tl.max(order, 0)
        place = tl.where(is_it, choice, place)
        order = tl.where(is_it, TAKEN, order)
    is_chosen = place < NUM_CHOSEN
    if rule.IS_RENORMALIZED:
        scores = scores / (tl.sum(tl.where(is_chosen, scores, 0.0), 0) + 1e-20)
    tl.store(expert_ids_ptr + row * NUM_CHOSEN + place, experts.to(tl.int64), mask=is_chosen)
    tl.store(routing_weights_ptr + row * NUM_CHOSEN + place, scores * scaling, mask=is_chosen)


@triton.jit
def _choose(
    expert_ids_ptr: tl.tensor,
    routing_weights_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    scaling: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    EXPERT_TILE: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_RENORMALIZED: tl.constexpr,
) -> None:
    """Chooses the experts of one row."""
    _choose_of_row(
        expert_ids_ptr,
        routing_weights_ptr,
        logits_ptr,
        bias_ptr,
        tl.program_id(0).to(tl.int64),
        scaling,
        HAS_BIAS,
        Rule(NUM_EXPERTS, EXPERT_TILE, NUM_CHOSEN, NUM_GROUPS, NUM_CHOSEN_GROUPS, IS_SIGMOID, IS_RENORMALIZED),
    )


@triton.jit
def _route(
    expert_ids_ptr: tl.tensor,
    routing_weights_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    scratch_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    row_stride: tl.tensor,
    eps: tl.tensor,
    scaling: tl.tensor,
    HIDDEN: tl.constexpr,
    HIDDEN_TILE: tl.constexpr,
    NORMED: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERT_TILE: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_RENORMALIZED: tl.constexpr,
) -> None:
    """Multiplies one row, after its norm if NORMED, by the gate's rows of some experts. The last program of a row to
    finish chooses its experts."""
    first_expert = tl.program_id(0) * AT_ONCE
    row = tl.program_id(1).to(tl.int64)
    channels = tl.arange(0, HIDDEN_TILE)
    is_channel = channels < HIDDEN
    # Weights are loaded before the rows are there, so that the program waits for both at once.
    gate = tl.load(gate_ptr + first_expert * HIDDEN + channels, mask=is_channel, other=0.0)
    if NORMED:
        norm_weights = tl.load(norm_ptr + channels, mask=is_channel, other=0.0)
    wait_for_inputs(EARLY)
    values = tl.load(rows_ptr + row * row_stride + channels, mask=is_channel, other=0.0)
    if NORMED:
        values = normed_by(values, norm_weights, eps, HIDDEN)
        if first_expert == 0:
            tl.store(normed_ptr + row * HIDDEN + channels, values, mask=is_channel)
    for offset in tl.static_range(AT_ONCE):
        expert = first_expert + offset
        if offset > 0:
            is_there = is_channel & (expert < NUM_EXPERTS)
            gate = tl.load(gate_ptr + expert * HIDDEN + channels, mask=is_there, other=0.0)
        logit = tl.sum(values.to(tl.float32) * gate.to(tl.float32), 0)
        tl.store(scratch_ptr + row * NUM_EXPERTS + expert, logit, mask=expert < NUM_EXPERTS)
    tl.debug_barrier()  # all threads must have stored before one signals it
    if tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(arrivals_ptr + row, 0)
        _choose_of_row(
            expert_ids_ptr,
            routing_weights_ptr,
            scratch_ptr,
            bias_ptr,
            row,
            scaling,
            HAS_BIAS,
            Rule(NUM_EXPERTS, EXPERT_TILE, NUM_CHOSEN, NUM_GROUPS, NUM_CHOSEN_GROUPS, IS_SIGMOID, IS_RENORMALIZED),
        )


@operator("route", mutates_args=("arrivals",))
def route(
    rows: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    gate: torch.Tensor,
    bias: torch.Tensor | None,
    arrivals: torch.Tensor,
    num_chosen: int,
    num_groups: int,
    num_chosen_groups: int,
    scores: str,
    renormalized: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose experts for each row, or for its norm if there is a `norm_weight`.

    Returns what `choose_experts` does, and the RMSNorm of the rows [rows, hidden_size], which is empty without one.

    Args:
        rows: [rows, hidden_size] of any row stride and dtype.
        norm_weight: [hidden_size], as `rms_norm` takes it.
        gate: [experts, hidden_size], contiguous, of any dtype.
        arrivals: [rows or more] int32 zeros, and zero again afterwards; only kernels of one stream may share it. The
            arguments that are not listed are as in `choose_experts`.
    """
    num_rows, hidden_size = rows.shape
    num_experts = gate.shape[0]
    assert_whole((gate,), num_experts, hidden_size)
    assert rows.stride(1) == 1 and len(arrivals) >= num_rows
    normed = rows.new_empty(0 if norm_weight is None else rows.shape)
    logits = torch.empty((num_rows, num_experts), dtype=torch.float32, device=rows.device)
    expert_ids, weights, choice = _choice(logits, bias, num_chosen, num_groups, num_chosen_groups, scores, renormalized)
    hidden_tile = triton.next_power_of_2(hidden_size)
    with launch_on(rows):
        at_once = 1 if num_rows <= _FEW_ROWS else _EXPERTS_AT_ONCE
        _route[(triton.cdiv(num_experts, at_once), num_rows)](
            expert_ids,
            weights,
            logits if norm_weight is None else normed,
            logits,
            rows,
            logits if norm_weight is None else norm_weight,
            gate,
            logits if bias is None else bias,
            arrivals,
            rows.stride(0),
            eps,
            scaling,
            HIDDEN=hidden_size,
            HIDDEN_TILE=hidden_tile,
            NORMED=norm_weight is not None,
            AT_ONCE=at_once,
            **placed(True),
            num_warps=max(1, min(4, hidden_tile // 2048)),
            **choice,
        )
    return expert_ids, weights, normed


@operator("choose_experts")
def choose_experts(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    num_chosen: int,
    num_groups: int,
    num_chosen_groups: int,
    scores: str,
    renormalized: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each row, and compute their weights.

    Returns the ids [rows, chosen] int64, the highest score first, where ties go to the lower id; and the weights [rows,
    chosen] float32: the scores without bias, divided by their sum if `renormalized`, times `scaling`.

    Args:
        logits: [rows, experts] float32, contiguous.
        bias: [experts] float32, added to the scores only for the choice.
        num_groups: number of equal groups of experts. A row uses the `num_chosen_groups` with the highest sum of their
            two best. If these are not all groups, the numbers of experts and groups must be powers of two.
        scores: `sigmoid`, or `softmax` over all experts.
    """
    expert_ids, weights, choice = _choice(logits, bias, num_chosen, num_groups, num_chosen_groups, scores, renormalized)
    with launch_on(logits):
        _choose[(len(logits),)](
            expert_ids,
            weights,
            logits,
            logits if bias is None else bias,
            scaling,
            num_warps=1 if logits.shape[1] <= 128 else 2,
            **choice,
        )
    return expert_ids, weights


def _choice(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    num_chosen: int,
    num_groups: int,
    num_chosen_groups: int,
    scores: str,
    renormalized: bool,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, int | bool]]:
    """Allocate expert ids and weights, return the compile-time constants of both kernels, and check their
    preconditions."""
    num_rows, num_experts = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32 and scores in ("sigmoid", "softmax")
    assert can_choose(num_experts, num_groups, num_chosen_groups) and num_chosen <= num_experts
    weights = logits.new_empty(num_rows, num_chosen)
    constants: dict[str, int | bool] = {
        "NUM_EXPERTS": num_experts,
        "EXPERT_TILE": triton.next_power_of_2(num_experts),
        "NUM_CHOSEN": num_chosen,
        "NUM_GROUPS": num_groups,
        "NUM_CHOSEN_GROUPS": num_chosen_groups,
        "IS_SIGMOID": scores == "sigmoid",
        "HAS_BIAS": bias is not None,
        "IS_RENORMALIZED": renormalized,
    }
    return torch.empty_like(weights, dtype=torch.int64), weights, constants


def can_choose(num_experts: int, num_groups: int, num_chosen_groups: int) -> bool:
    """Return whether the kernel supports these groups."""
    if num_chosen_groups >= num_groups:
        return True
    return all(number & (number - 1) == 0 for number in (num_experts, num_groups)) and num_experts >= 2 * num_groups
