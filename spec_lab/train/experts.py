"""What layers of experts have here beside transformers' own code: how they are computed, and how their load is kept
even."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EVERY_EXPERT = "spec_lab_every_expert"
"""The name under which transformers finds `every_expert`."""
BIAS_STEP = 1e-3


def every_expert(experts: nn.Module, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Let every expert compute every row `[rows, hidden]`, and add up those that are `chosen` `[rows, num_chosen]`.

    For experts of a few thousand weights that is one plain product, faster than sorting rows by expert would be, and a
    GPU can record it.
    """
    gate_up, down = experts.gate_up_proj, experts.down_proj
    assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)
    num_experts = len(gate_up)
    of_all = weights.new_zeros(len(rows), num_experts).scatter(1, chosen, weights)
    gate, up = F.linear(rows, gate_up.flatten(0, 1)).unflatten(-1, (num_experts, 2, -1)).unbind(-2)
    hidden = F.silu(gate) * up * of_all.unsqueeze(-1).to(gate.dtype)
    return F.linear(hidden.flatten(-2), down.transpose(0, 1).flatten(1)).to(rows.dtype)


def balance_experts(model: nn.Module) -> None:
    """Keep the experts' load even without a loss for it (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    After each forward of training the bias of the choice moves up for the experts that were chosen less than their
    share, and down for the others.
    """
    for router in model.modules():
        if hasattr(router, "e_score_correction_bias"):
            router.register_forward_hook(_move_bias)


@torch.no_grad()
def _move_bias(router: nn.Module, _: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    bias, chosen = router.e_score_correction_bias, output[2].flatten()
    assert isinstance(bias, Tensor)
    if router.training:
        load = torch.zeros_like(bias).index_add(
            0, chosen.flatten(), torch.ones_like(chosen.flatten(), dtype=bias.dtype)
        )
        bias.add_(BIAS_STEP * torch.sign(load.mean() - load))
