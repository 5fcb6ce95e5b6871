"""Says which part of each tensor a process reads: all of it, or a share if several processes split a target."""

from __future__ import annotations

from typing import Protocol

import torch

from spec_lab.checkpoints.plan import LayerPlan

Part = tuple[slice, ...]
"""The rows, or rows and columns, of a tensor that are kept."""


class Slices(Protocol):
    """Says which share of a decoder one process reads."""

    def share(self, plan: LayerPlan) -> LayerPlan:
        """Return the plan of this process's share of a layer, from which its KV cache follows too."""
        ...

    def part(self, name: str, shape: tuple[int, ...]) -> Part | None:
        """Return the part of the tensor that a checkpoint calls `name`; None if every process has all of it."""
        ...


class WholeTensors:
    """The whole of every tensor."""

    def share(self, plan: LayerPlan) -> LayerPlan:
        return plan

    def part(self, name: str, shape: tuple[int, ...]) -> Part | None:
        return None


WHOLE_TENSORS = WholeTensors()


def kept_part(slices: Slices, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a whole tensor. A smaller part is copied, so that the whole tensor can be
    freed."""
    part = slices.part(name, tuple(tensor.shape))
    return tensor if part is None else tensor[part].clone(memory_format=torch.contiguous_format)
