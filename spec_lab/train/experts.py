"""A layer of experts as trained: every expert computes every row, and the router's weights choose among the results.

For experts of a few thousand weights that is one plain product, faster than sorting rows by expert would be.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_lab.checkpoints.expert_sizes import ExpertSizes
from spec_lab.train.layers import INITIAL_STD, SwiGLU

BIAS_STEP = 1e-3


class TrainableRouter(nn.Module):
    """The sigmoid router of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2), one group.

    The experts' load is kept even without a loss for it: after each step the bias of the choice moves up for those that
    were chosen less than their share, and down for the others.
    """

    e_score_correction_bias: Tensor

    def __init__(self, sizes: ExpertSizes, hidden_size: int) -> None:
        super().__init__()
        assert sizes.num_groups == 1 and sizes.correction_bias, "the recipes have no groups, and a bias"
        self.sizes = sizes
        self.weight = nn.Parameter(INITIAL_STD * torch.randn(sizes.num_experts, hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(sizes.num_experts))

    def forward(self, rows: Tensor) -> Tensor:
        """Return the weights `[rows, num_experts]` of rows `[rows, hidden]`; zero for the experts that are not
        chosen."""
        with torch.autocast(rows.device.type, enabled=False):
            scores = F.linear(rows.float(), self.weight.float()).sigmoid()
        chosen = (scores.detach() + self.e_score_correction_bias).topk(self.sizes.num_chosen, dim=-1).indices
        is_chosen = torch.zeros_like(scores).scatter_(1, chosen, 1.0)
        if self.training:
            with torch.no_grad():
                load = is_chosen.mean(0)
                self.e_score_correction_bias.add_(BIAS_STEP * torch.sign(load.mean() - load))
        weights = scores * is_chosen
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.sizes.scaling


class StackedExperts(nn.Module):
    """The routed experts' weights, all of a kind in one tensor."""

    def __init__(self, sizes: ExpertSizes, hidden_size: int) -> None:
        super().__init__()
        inner = sizes.intermediate_size
        self.gate_up_proj = nn.Parameter(INITIAL_STD * torch.randn(sizes.num_experts, 2 * inner, hidden_size))
        self.down_proj = nn.Parameter(INITIAL_STD * torch.randn(sizes.num_experts, hidden_size, inner))

    def forward(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Add up the experts of rows `[rows, hidden]`, by `weights` `[rows, num_experts]`."""
        num_experts = weights.shape[-1]
        gate, up = F.linear(rows, self.gate_up_proj.flatten(0, 1)).unflatten(-1, (num_experts, 2, -1)).unbind(-2)
        hidden = F.silu(gate) * up * weights.unsqueeze(-1).to(gate.dtype)
        return F.linear(hidden.flatten(-2), self.down_proj.transpose(0, 1).flatten(1))


class TrainableExperts(nn.Module):
    """Stands in the MLP's place: router, routed experts, shared expert, under the names of checkpoints."""

    def __init__(self, sizes: ExpertSizes, hidden_size: int) -> None:
        super().__init__()
        self.gate = TrainableRouter(sizes, hidden_size)
        self.experts = StackedExperts(sizes, hidden_size)
        self.shared_experts = SwiGLU(hidden_size, sizes.shared_intermediate_size)

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, -2)
        routed = self.experts(rows, self.gate(rows))
        return routed.view(hidden.shape) + self.shared_experts(hidden)
