"""A partition says how a decoder's weights lie over the processes of a run: all in one, or a part in each.

Whoever builds layers asks a partition for its share of each tensor, and for the products that need the other shares. In
one process that is the whole tensor and the plain product, so that nothing of this is left in the round.
"""

from __future__ import annotations

from typing import Protocol

import torch

from spec_lab.checkpoints.slices import Slices, WholeTensors
from spec_lab.models.linear import Linear, make_linear


class Partition(Slices, Protocol):
    """Says which share of a decoder one process has, and makes the products that need the others' shares."""

    def output(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, scales: torch.Tensor | None = None
    ) -> Linear:
        """Make the product that ends an attention or an MLP, from the share of its weight and the whole bias; `scales`
        are as in `make_linear`."""
        ...

    def head(self, weight: torch.Tensor) -> Linear:
        """Make the product that gives the logits of all tokens, from the whole weight [vocab, hidden_size]."""
        ...


class Whole(WholeTensors):
    """A model that is whole in one process."""

    def output(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, scales: torch.Tensor | None = None
    ) -> Linear:
        return make_linear(weight, bias, scales)

    def head(self, weight: torch.Tensor) -> Linear:
        return make_linear(weight)


WHOLE = Whole()
