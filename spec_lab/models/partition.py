"""A partition: how a decoder's weights are distributed over the processes of a run.

Code that builds layers asks the partition for this process's share of each tensor, and for the products that need the
other shares. With one process these are the whole tensor and the plain product, so a round costs nothing more.
"""

from __future__ import annotations

import torch

from spec_lab.checkpoints.checkpoint_files import Slices
from spec_lab.models.linear import Linear, make_linear


class Partition(Slices):
    """Decides which share of a decoder one process has, and makes the products that need the other shares. Here the
    whole model is in one process."""

    __slots__ = ()

    def output(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, scales: torch.Tensor | None = None
    ) -> Linear:
        """Make the product that ends an attention or an MLP, from this process's share of its weight and the whole
        bias.

        `scales` is as in `make_linear`.
        """
        return make_linear(weight, bias, scales)

    def head(self, weight: torch.Tensor) -> Linear:
        """Make the product for the logits of all tokens, from the whole weight [vocab, hidden_size]."""
        return make_linear(weight)


WHOLE = Partition()
