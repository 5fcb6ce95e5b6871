"""Additions to transformers' layers of experts: a way to compute them, and load balancing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EVERY_EXPERT = "spec_lab_every_expert"
"""The name under which `every_expert` is registered with transformers."""
BIAS_STEP = 1e-3


def every_expert(experts: nn.Module, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Run every expert on every row `[rows, hidden]`, and add up the outputs of the row's `chosen` experts.

    `chosen` are their numbers and `weights` the factors of their outputs, both `[rows, num_chosen]`.

    For experts of a few thousand weights, two plain products suffice. They are faster than sorting rows by expert, and
    a CUDA graph can capture them.
    """
    gate_up, down = experts.gate_up_proj, experts.down_proj
    assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)
    num_experts = len(gate_up)
    of_all = weights.new_zeros(len(rows), num_experts).scatter(1, chosen, weights)
    gate, up = F.linear(rows, gate_up.flatten(0, 1)).unflatten(-1, (num_experts, 2, -1)).unbind(-2)
    hidden = F.silu(gate) * up * of_all.unsqueeze(-1).to(gate.dtype)
    return F.linear(hidden.flatten(-2), down.transpose(0, 1).flatten(1)).to(rows.dtype)


def balance_experts(model: nn.Module) -> None:
    """Balance the experts' load without an auxiliary loss (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    After each training forward, the router's bias rises for experts that were chosen less often than the average, and
    falls for those that were chosen more often.
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
