"""The optimisers: AdamW, or Muon (Jordan et al., 2024) for the matrices of layers and AdamW for everything else."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from spec_lab.train.config import Optimisation, Optimiser

NOT_OF_A_LAYER = ("lm_head", "embed")
"""Parts of the names of matrices with a row for each token. AdamW updates these, since their rows change
independently."""


def make_optimisers(module: nn.Module, knobs: Optimisation, device: torch.device) -> list[torch.optim.Optimizer]:
    """Make the optimisers that `knobs` select, each for a part of the weights."""
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    if knobs.optimiser == Optimiser.adamw:
        return [adamw([parameter for _, parameter in named], knobs, device)]
    of_layers = [name for name, it in named if it.ndim == 2 and not any(word in name for word in NOT_OF_A_LAYER)]
    others = [parameter for name, parameter in named if name not in of_layers]
    matrices = [parameter for name, parameter in named if name in of_layers]
    # `match_rms_adamw` makes its steps as long as AdamW's, so that both use the same learning rate.
    muon = torch.optim.Muon(matrices, lr=0.0, weight_decay=knobs.weight_decay, adjust_lr_fn="match_rms_adamw")
    return [adamw(others, knobs, device), muon]


def adamw(parameters: Sequence[nn.Parameter], knobs: Optimisation, device: torch.device) -> torch.optim.AdamW:
    """Make AdamW with weight decay on matrices only, since a norm's scale should not shrink."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": knobs.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if device.type != "cuda":
        return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95))
    rate = torch.zeros((), device=device)
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True, capturable=True)


def set_learning_rate(optimisers: Sequence[torch.optim.Optimizer], learning_rate: float) -> None:
    """Set the learning rate. If it is a device tensor, it is changed in place, since a captured step reads it there."""
    for group in (group for optimiser in optimisers for group in optimiser.param_groups):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate
