"""A partition says how a decoder's weights lie over the processes of a run: all in one, or a part in each.

Whoever builds layers asks a partition for its share of each tensor, and for the products that need the other shares. In
one process that is the whole tensor and the plain product, so that nothing of this is left in the round.
"""

from __future__ import annotations

from typing import Protocol

import torch

from spec_lab.models.linear import Linear, make_linear
from spec_lab.models.plan import LayerPlan

Part = tuple[slice, ...]
"""It says which rows, or rows and columns, of a tensor are kept."""


class Partition(Protocol):
    """Says which share of a decoder one process has."""

    def share(self, plan: LayerPlan) -> LayerPlan:
        """Return the sizes that this process's share of a layer has, its KV cache among them."""
        ...

    def part(self, name: str, shape: tuple[int, ...]) -> Part | None:
        """Return the share of the tensor that a checkpoint calls `name`; None where every process has all of it."""
        ...

    def output(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, scales: torch.Tensor | None = None
    ) -> Linear:
        """Make the product that ends an attention or an MLP, from the share of its weight and the whole bias; `scales`
        are as in `make_linear`."""
        ...

    def head(self, weight: torch.Tensor) -> Linear:
        """Make the product that gives the logits of all tokens, from the whole weight [vocab, hidden_size]."""
        ...


class Whole:
    """Keeps everything in one process."""

    def share(self, plan: LayerPlan) -> LayerPlan:
        return plan

    def part(self, name: str, shape: tuple[int, ...]) -> Part | None:
        return None

    def output(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, scales: torch.Tensor | None = None
    ) -> Linear:
        return make_linear(weight, bias, scales)

    def head(self, weight: torch.Tensor) -> Linear:
        return make_linear(weight)


WHOLE = Whole()


def kept_part(partition: Partition, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the share of a tensor that is in memory as a whole; a copy where it is a part, so that the rest can go."""
    part = partition.part(name, tuple(tensor.shape))
    return tensor if part is None else tensor[part].clone(memory_format=torch.contiguous_format)
