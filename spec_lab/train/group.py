"""The processes that train one head together: one, or those of `torchrun`, each with a part of every batch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
LONGEST_WAIT = timedelta(hours=24)
"""How long processes wait for the first one, which alone writes texts, proves the head and decodes with it."""


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of a training. Process 0 also checks the head, decodes with it, and writes files."""

    rank: int = 0
    size: int = 1

    def add_up(self, terms: Tensor) -> None:
        """Replace `terms` by their sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(terms)

    def agree(self, value: float, device: torch.device) -> float:
        """Return the first process's `value`."""
        if self.size == 1:
            return value
        held = torch.tensor(value, dtype=torch.float64, device=device)
        dist.broadcast(held, 0)
        return float(held.item())


ALONE = Processes()


@contextmanager
def joined(wanted: str) -> Iterator[tuple[Processes, torch.device]]:
    """Join the processes that were started, until the block ends, and yield the group and this process's device.

    Inside, torchrun's variables are hidden, since an engine would take them for tensor parallelism.
    """
    name = ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE, torch.device(name)
        return
    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=LONGEST_WAIT)
    group = Processes(dist.get_rank(), size)
    hidden = {name: os.environ.pop(name) for name in OF_TORCHRUN if name in os.environ}
    try:
        yield group, device
        dist.barrier()
        dist.destroy_process_group()  # not after a failure, since it could wait for a process that has ended
    finally:
        os.environ.update(hidden)
