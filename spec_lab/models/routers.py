"""Routers: they choose the experts of each row, and their weights.

Logits and scores are float32 for every dtype of the model, as in DeepSeek-V3 and GLM-4.5. Ties go to the lower expert.
`torch.topk` promises no order of ties, so with it a row's output could depend on its batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from spec_lab.checkpoints.plan import ExpertSizes, RouterScores
from spec_lab.core.kernel_set import KernelSet, Op
from spec_lab.models.linear import Linear, make_linear


@dataclass(slots=True)
class Routing:
    """The choice for some rows.

    Attributes:
        expert_ids: [rows, num_chosen] the experts of each row, all different.
        weights: [rows, num_chosen] float32 factors of their outputs.
    """

    expert_ids: torch.Tensor
    weights: torch.Tensor


class Router(Protocol):
    """Chooses experts for [rows, hidden_size]."""

    def __call__(self, rows: torch.Tensor) -> Routing: ...


class SoftmaxRouter:
    """Chooses the likeliest experts, and weighs them by their softmax probability (Qwen3-MoE, Qwen3-Next).

    A softmax over the chosen alone, as in gpt-oss, is the same with `sizes.renormalized`.
    """

    __slots__ = ("_logits", "_sizes")

    def __init__(self, weight: torch.Tensor, sizes: ExpertSizes, bias: torch.Tensor | None = None) -> None:
        """`weight` is [num_experts, hidden_size]; `bias` [num_experts] is added to the logits (gpt-oss)."""
        self._logits = float32_product(weight, bias)
        self._sizes = sizes

    def __call__(self, rows: torch.Tensor) -> Routing:
        scores = torch.softmax(self._logits(rows.float()), dim=-1)
        expert_ids = highest(scores, self._sizes.num_chosen)
        return Routing(expert_ids, chosen_weights(scores, expert_ids, self._sizes))


class SigmoidRouter:
    """Scores each expert by a sigmoid. The choice may also use a bias and groups; the weights use only the scores.

    Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.1.2); GLM-4.5.
    """

    __slots__ = ("_bias", "_logits", "_sizes")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, sizes: ExpertSizes) -> None:
        """`weight` is [num_experts, hidden_size]; `bias` [num_experts] is added for the choice only."""
        self._logits = float32_product(weight)
        self._bias = None if bias is None else bias.float()
        self._sizes = sizes

    def __call__(self, rows: torch.Tensor) -> Routing:
        sizes = self._sizes
        scores = torch.sigmoid(self._logits(rows.float()))
        ranked = scores if self._bias is None else scores + self._bias
        if sizes.num_chosen_groups < sizes.num_groups:
            ranked = best_groups_only(ranked, sizes.num_groups, sizes.num_chosen_groups)
        expert_ids = highest(ranked, sizes.num_chosen)
        return Routing(expert_ids, chosen_weights(scores, expert_ids, sizes))


def build_router(sizes: ExpertSizes, tensors: Mapping[str, torch.Tensor], prefix: str, kernels: KernelSet) -> Router:
    """Build the router from its Hugging Face names below `prefix` (ending in `gate.`)."""
    if sizes.clamp is not None:
        return SoftmaxRouter(tensors[f"{prefix}weight"], sizes, tensors[f"{prefix}bias"])
    bias = tensors.get(f"{prefix}e_score_correction_bias")
    return kernels.get(Op.ROUTER, torch_router)(tensors[f"{prefix}weight"], bias, sizes)


def torch_router(weight: torch.Tensor, bias: torch.Tensor | None, sizes: ExpertSizes) -> Router:
    """Make the router for the kind of scores in `sizes`, from its weight [num_experts, hidden_size] and the bias of the
    choice, if any."""
    if sizes.scores is RouterScores.SOFTMAX:
        assert bias is None and sizes.num_groups == 1, "no family has a softmax with a bias or groups"
        return SoftmaxRouter(weight, sizes)
    return SigmoidRouter(weight, bias, sizes)


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices [rows, count] of the highest scores [rows, columns]; ties go to the lower index."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def best_groups_only(scores: torch.Tensor, num_groups: int, num_kept: int) -> torch.Tensor:
    """Replace scores [rows, experts] by -inf outside the best groups: those with the highest sum of their two best
    scores.

    DeepSeek's older code used 0 instead, which can beat a score with a negative bias.
    """
    groups = scores.unflatten(-1, (num_groups, -1))
    kept = highest(groups.topk(2, dim=-1).values.sum(dim=-1), num_kept)
    is_kept = torch.zeros(groups.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, kept, True)
    return groups.masked_fill(~is_kept.unsqueeze(-1), float("-inf")).flatten(1)


def chosen_weights(scores: torch.Tensor, expert_ids: torch.Tensor, sizes: ExpertSizes) -> torch.Tensor:
    """Turn the scores [rows, experts] of the chosen experts into their weights."""
    weights = scores.gather(1, expert_ids)
    if sizes.renormalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights if sizes.scaling == 1.0 else weights * sizes.scaling


def float32_product(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Make the product of float32 rows with a weight of any dtype."""
    return make_linear(weight.float(), None if bias is None else bias.float())
