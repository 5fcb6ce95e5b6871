"""The router of experts for a few rows: its logits, and the choice with its weights, a launch each instead of a dozen.

Everything is float32, whatever the rows are. A row's logits are sums in one order and its choice looks at nothing else,
so that no bit of it depends on the rows beside it.

Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) for scores, groups and weights.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.utils import assert_rows_of, launch_on

_CHANNELS_AT_ONCE = 2048


@triton.jit
def _logits(
    out_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    row_stride: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
) -> None:
    """Multiplies one row with one expert's row of the gate."""
    expert = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    acc = tl.zeros((CHANNEL_TILE,), tl.float32)
    for first in range(0, HIDDEN, CHANNEL_TILE):
        channels = first + tl.arange(0, CHANNEL_TILE)
        is_channel = channels < HIDDEN
        values = tl.load(rows_ptr + row * row_stride + channels, mask=is_channel, other=0.0).to(tl.float32)
        acc += values * tl.load(gate_ptr + expert * HIDDEN + channels, mask=is_channel, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * NUM_EXPERTS + expert, tl.sum(acc, 0))


@triton.jit
def _choose(
    expert_ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    scaling: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    EXPERT_TILE: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    CHOICE_TILE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_RENORMALIZED: tl.constexpr,
) -> None:
    """Chooses the experts of one row: the highest score again and again, of equal ones the first."""
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERT_TILE)
    is_expert = experts < NUM_EXPERTS
    logits = tl.load(logits_ptr + row * NUM_EXPERTS + experts, mask=is_expert, other=float("-inf"))
    if IS_SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        scores = tl.exp(logits - tl.max(logits, 0))
        scores = scores / tl.sum(scores, 0)
    ranked = scores
    if HAS_BIAS:
        ranked += tl.load(bias_ptr + experts, mask=is_expert, other=0.0)
    # A row that is not finite chooses something that exists, too.
    ranked = tl.where(is_expert & (ranked == ranked), ranked, float("-inf"))
    if NUM_CHOSEN_GROUPS < NUM_GROUPS:
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
        ranked = tl.reshape(tl.where(is_kept[:, None], grouped, float("-inf")), (EXPERT_TILE,))
    choices = tl.arange(0, CHOICE_TILE)
    chosen = tl.zeros((CHOICE_TILE,), tl.int32)
    weights = tl.zeros((CHOICE_TILE,), tl.float32)
    for choice in tl.static_range(NUM_CHOSEN):
        expert = tl.argmax(ranked, 0)
        is_it = experts == expert
        chosen = tl.where(choices == choice, expert, chosen)
        weights = tl.where(choices == choice, tl.sum(tl.where(is_it, scores, 0.0), 0), weights)
        ranked = tl.where(is_it, float("-inf"), ranked)
    if IS_RENORMALIZED:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    places = row * NUM_CHOSEN + choices
    tl.store(expert_ids_ptr + places, chosen.to(tl.int64), mask=choices < NUM_CHOSEN)
    tl.store(weights_ptr + places, weights * scaling, mask=choices < NUM_CHOSEN)


@torch.library.custom_op("spec_kernels::router_logits", mutates_args=("out",))
def router_logits(out: torch.Tensor, rows: torch.Tensor, gate: torch.Tensor) -> None:
    """The product of rows and gate in float32.

    Args:
        out: [rows, experts] float32, contiguous, written.
        rows: [rows, hidden_size] of any row stride and dtype.
        gate: [experts, hidden_size], contiguous, of any dtype.
    """
    num_rows, hidden_size = rows.shape
    num_experts = gate.shape[0]
    assert_rows_of(out, num_rows, num_experts)
    assert_rows_of(gate, num_experts, hidden_size)
    assert out.is_contiguous() and gate.is_contiguous() and rows.stride(1) == 1 and out.dtype == torch.float32
    with launch_on(out):
        _logits[(num_experts, num_rows)](
            *(out, rows, gate, rows.stride(0)),
            NUM_EXPERTS=num_experts,
            HIDDEN=hidden_size,
            CHANNEL_TILE=min(_CHANNELS_AT_ONCE, triton.next_power_of_2(hidden_size)),
        )


@torch.library.custom_op("spec_kernels::choose_experts", mutates_args=("expert_ids", "weights"))
def choose_experts(
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    num_groups: int,
    num_chosen_groups: int,
    scores: str,
    renormalized: bool,
    scaling: float,
) -> None:
    """The experts of each row, and what they weigh.

    Args:
        expert_ids: [rows, chosen] int64, contiguous, written: the highest first, of equal ones the lower.
        weights: [rows, chosen] float32, contiguous, written: the scores, without bias, divided by their sum where
            `renormalized`, times `scaling`.
        logits: [rows, experts] float32, contiguous.
        bias: [experts] float32, added to the scores for the choice alone.
        num_groups: equal groups of experts, of which a row uses the `num_chosen_groups` whose two best sum highest;
            with more groups than that, experts and groups are powers of two.
        scores: `sigmoid`, or `softmax` over all experts.
    """
    num_rows, num_experts = logits.shape
    num_chosen = expert_ids.shape[1]
    assert_rows_of(weights, num_rows, num_chosen)
    assert expert_ids.is_contiguous() and weights.is_contiguous() and logits.is_contiguous()
    assert logits.dtype == weights.dtype == torch.float32 and scores in ("sigmoid", "softmax")
    assert can_choose(num_experts, num_groups, num_chosen_groups)
    with launch_on(logits):
        _choose[(num_rows,)](
            *(expert_ids, weights, logits, logits if bias is None else bias, scaling),
            NUM_EXPERTS=num_experts,
            EXPERT_TILE=triton.next_power_of_2(num_experts),
            NUM_CHOSEN=num_chosen,
            CHOICE_TILE=triton.next_power_of_2(num_chosen),
            NUM_GROUPS=num_groups,
            NUM_CHOSEN_GROUPS=num_chosen_groups,
            IS_SIGMOID=scores == "sigmoid",
            HAS_BIAS=bias is not None,
            IS_RENORMALIZED=renormalized,
            num_warps=1 if num_experts <= 128 else 2,
        )


def can_choose(num_experts: int, num_groups: int, num_chosen_groups: int) -> bool:
    """Tell whether the kernel has these groups."""
    if num_chosen_groups >= num_groups:
        return True
    return all(number & (number - 1) == 0 for number in (num_experts, num_groups)) and num_experts >= 2 * num_groups


def choose_experts_reference(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    num_chosen: int,
    num_groups: int,
    num_chosen_groups: int,
    scores: str,
    renormalized: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what `choose_experts` computes, a row after the other: expert ids and weights, [rows, chosen] each."""
    values = logits.sigmoid() if scores == "sigmoid" else logits.softmax(-1)
    all_ids, all_weights = [], []
    for row in values:
        ranked = row if bias is None else row + bias
        groups = list(ranked.view(num_groups, -1))
        best = sorted(range(num_groups), key=lambda group: -float(groups[group].topk(2).values.sum()))
        if num_chosen_groups < num_groups:
            kept = [groups[g] if g in best[:num_chosen_groups] else groups[g] - float("inf") for g in range(num_groups)]
            ranked = torch.cat(kept)
        ids = sorted(range(len(row)), key=lambda expert: -float(ranked[expert]))[:num_chosen]
        weights = row[ids] / (row[ids].sum() + 1e-20) if renormalized else row[ids]
        all_ids.append(torch.tensor(ids, device=logits.device))
        all_weights.append(weights * scaling)
    return torch.stack(all_ids), torch.stack(all_weights)
