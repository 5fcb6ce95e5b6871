"""All-reduce and all-gather between the processes of `torchrun`, by `torch.distributed` and its default group.

The group uses NCCL, or gloo on CPUs. Both functions are custom operators, so that the recorder of graphs on a CPU
(`engine.tape`) sees what they write. A CUDA graph captures them directly. torch's functional collectives are operators
too, but they have a private name, and each needs a separate wait.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

# torch 2.13 renamed this function, and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@torch.library.custom_op("spec_lab::add_up", mutates_args=("terms",))
def _add_up(terms: torch.Tensor) -> None:
    dist.all_reduce(terms)


@torch.library.custom_op("spec_lab::gather", mutates_args=("parts",))
def _gather(parts: torch.Tensor, part: torch.Tensor) -> None:
    _all_gather(parts, part)


class Collectives:
    """Communication between `size` processes. Each must make the same calls in the same order."""

    def __init__(self, size: int) -> None:
        self._size = size

    def add_up(self, terms: torch.Tensor) -> None:
        """Replace `terms` by their sum over all processes, bit-equal in each."""
        _add_up(terms)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the parts of all processes [size, *part.shape]."""
        parts = part.new_empty(self._size * part.shape[0], *part.shape[1:])
        _gather(parts, part)
        return parts.unflatten(0, (self._size, -1))
