"""The processes that train one drafter together: one, or those of `torchrun`, each with a part of every batch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from spec_lab.core.errors import UserError
from spec_lab.core.ranks import Ranks, ranks

OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class TrainingGroup(Protocol):
    """The processes of a training, as a step uses them."""

    @property
    def rank(self) -> int:
        """The number of this process, from 0; process 0 also checks the drafter, decodes with it, and writes files."""

    @property
    def size(self) -> int:
        """The number of processes."""

    def add_up(self, terms: Tensor) -> None:
        """Replace `terms` by their sum over all processes, in place."""

    def agree(self, value: float) -> float:
        """Return the first process's `value`."""


class TrainedAlone:
    """A training group of one process."""

    rank = 0
    size = 1

    def add_up(self, terms: Tensor) -> None:
        """Do nothing: there is no other process."""

    def agree(self, value: float) -> float:
        return value


ALONE = TrainedAlone()


@dataclass(frozen=True, slots=True)
class TrainedTogether:
    """The training group of all processes of `torch.distributed`."""

    rank: int
    size: int
    device: torch.device

    def add_up(self, terms: Tensor) -> None:
        dist.all_reduce(terms)

    def agree(self, value: float) -> float:
        held = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.broadcast(held, 0)
        return float(held.item())


@contextmanager
def joined(wanted: str) -> Iterator[tuple[TrainingGroup, torch.device]]:
    """Join the processes that were started, until the block ends, and yield the group and this process's device.

    If there are several, torchrun's environment variables are hidden inside the block. Otherwise an engine would refuse
    to run without tensor parallelism, but here each process has the whole target.

    Raises:
        UserError: the machine has fewer GPUs than processes, or the processes or the device cannot be used.
    """
    own, device = ranks(), training_device(wanted)
    if own.size == 1:
        yield ALONE, device
        return
    device = _own_device(device, own)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    hidden = {name: os.environ.pop(name) for name in OF_TORCHRUN if name in os.environ}
    try:
        yield TrainedTogether(own.rank, own.size, device), device
        dist.barrier()
        dist.destroy_process_group()  # not after a failure, since it could wait for a process that has ended
    finally:
        os.environ.update(hidden)


def _own_device(device: torch.device, own: Ranks) -> torch.device:
    if device.type != "cuda":
        return device
    if torch.cuda.device_count() < own.local_size:
        raise UserError(
            f"{own.local_size} processes were started on a machine with {torch.cuda.device_count()} GPUs; start at "
            "most one for each GPU, or use device=cpu"
        )
    torch.cuda.set_device(own.local_rank)
    return torch.device("cuda", own.local_rank)


def training_device(wanted: str) -> torch.device:
    """Return the device that `device=` names; `auto` takes a GPU if there is one.

    Raises:
        UserError: there is no such device, or torch finds no such GPU.
    """
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = wanted.partition(":")
    if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdecimal())):
        raise UserError(f"device={wanted} is unknown; use auto, cpu, cuda or cuda:1")
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device={wanted}: torch finds {torch.cuda.device_count()} GPUs here; use device=auto")
    return device
