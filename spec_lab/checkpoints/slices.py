"""Shares of tensors: a process reads all of each, or a part where several processes share a target."""

from __future__ import annotations

from typing import Protocol

import torch

from spec_lab.checkpoints.plan import LayerPlan

Part = tuple[slice, ...]
"""It says which rows, or rows and columns, of a tensor are kept."""


class Slices(Protocol):
    """Says which share of a decoder one process reads."""

    def share(self, plan: LayerPlan) -> LayerPlan:
        """Return the sizes that this process's share of a layer has, its KV cache among them."""
        ...

    def part(self, name: str, shape: tuple[int, ...]) -> Part | None:
        """Return the share of the tensor that a checkpoint calls `name`; None where every process has all of it."""
        ...


class WholeTensors:
    """Reads every tensor as it stands."""

    def share(self, plan: LayerPlan) -> LayerPlan:
        return plan

    def part(self, name: str, shape: tuple[int, ...]) -> Part | None:
        return None


WHOLE_TENSORS = WholeTensors()


def kept_part(slices: Slices, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the share of a tensor that is in memory as a whole; a copy where it is a part, so that the rest can go."""
    part = slices.part(name, tuple(tensor.shape))
    return tensor if part is None else tensor[part].clone(memory_format=torch.contiguous_format)
