"""The optimisers: AdamW, or Muon (Jordan et al., 2024) for the matrices of layers and AdamW for everything else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from spec_lab.train.module_config import OptimisationConfig, Optimiser

NOT_OF_A_LAYER = ("lm_head", "embed")
"""Parts of the names of matrices with a row for each token. AdamW updates these, since their rows change
independently."""


def make_optimiser(
    module: nn.Module, optimisation: OptimisationConfig, device: torch.device
) -> torch.optim.AdamW | Several:
    """Make the optimiser that a training's options select."""
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    if optimisation.optimiser == Optimiser.adamw:
        return adamw([parameter for _, parameter in named], optimisation, device)
    of_layers = [name for name, it in named if it.ndim == 2 and not any(word in name for word in NOT_OF_A_LAYER)]
    others = adamw([parameter for name, parameter in named if name not in of_layers], optimisation, device)
    matrices = [parameter for name, parameter in named if name in of_layers]
    # `match_rms_adamw` makes its steps as long as AdamW's, so that both use the same learning rate.
    muon = torch.optim.Muon(matrices, lr=0.0, weight_decay=optimisation.weight_decay, adjust_lr_fn="match_rms_adamw")
    return Several([others, muon])


def adamw(
    parameters: Sequence[nn.Parameter], optimisation: OptimisationConfig, device: torch.device
) -> torch.optim.AdamW:
    """Make AdamW with weight decay on matrices only, since a norm's scale should not shrink."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": optimisation.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if device.type != "cuda":
        return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95))
    rate = torch.zeros((), device=device)
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True, capturable=True)


class Several:
    """Several optimisers, each for a part of the weights, with the interface of one."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = parts

    @property
    def param_groups(self) -> Iterable[dict[str, Any]]:
        """The groups of all parts."""
        return chain.from_iterable(part.param_groups for part in self._parts)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self._parts:
            part.zero_grad(set_to_none)

    def step(self) -> None:
        for part in self._parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the parts, by index."""
        return {str(place): part.state_dict() for place, part in enumerate(self._parts)}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        for place, part in enumerate(self._parts):
            part.load_state_dict(states[str(place)])


def set_learning_rate(optimiser: torch.optim.Optimizer | Several, learning_rate: float) -> None:
    """Set the learning rate. If it is a device tensor, it is changed in place, since a captured step reads it there."""
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate
