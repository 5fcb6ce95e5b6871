"""This module lets the processes of `torchrun` add up and gather by `torch.distributed` and its default group.

The group is that of NCCL or, on CPUs, of gloo. Both are operators of their own, so that the CPU recorder sees what they
write; a CUDA graph captures them as they are. torch's functional collectives are operators too, but they stand under a
private name, and each needs a wait of its own. `torch.library.triton_op` is for what launches Triton kernels.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

# torch 2.13 has a new name for it, and warns of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@torch.library.custom_op("spec_lab::add_up", mutates_args=("terms",))
def _add_up(terms: torch.Tensor) -> None:
    dist.all_reduce(terms)


@torch.library.custom_op("spec_lab::gather", mutates_args=("parts",))
def _gather(parts: torch.Tensor, part: torch.Tensor) -> None:
    _all_gather(parts, part)


class TorchCollectives:
    """The sums and gathers of `models.tensor_parallel`, by torch.distributed."""

    def __init__(self, size: int) -> None:
        self._size = size

    def add_up(self, terms: torch.Tensor) -> None:
        _add_up(terms)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        parts = part.new_empty(self._size * part.shape[0], *part.shape[1:])
        _gather(parts, part)
        return parts.unflatten(0, (self._size, -1))
