"""A world is the processes over which a run's target is split: one, or those of `torchrun`.

They run the same program on the same requests, and wait for one another in collective operations. So all must emit the
same tokens, which is checked. If one fails, the others must not wait for it.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from spec_lab.build.models import resolve_device
from spec_lab.config.run import Run
from spec_lab.core.errors import UserError
from spec_lab.core.ranks import Ranks, ranks
from spec_lab.core.results import GenerationResult
from spec_lab.measure.shared_failure import failures_shared
from spec_lab.models.collectives import TorchCollectives
from spec_lab.models.partition import WHOLE, Partition
from spec_lab.models.tensor_parallel import TensorParallel


class World(Protocol):
    """The processes of a run, as the run uses them."""

    @property
    def size(self) -> int:
        """Return the number of processes."""
        ...

    @property
    def partition(self) -> Partition:
        """Return this process's share of the target."""
        ...

    def require_agreement(self, result: GenerationResult) -> None:
        """Raise RuntimeError if another process generated something else."""
        ...


class Alone:
    """A run of one process."""

    size = 1
    partition: Partition = WHOLE

    def require_agreement(self, result: GenerationResult) -> None:
        """Do nothing: there is no other process."""


ALONE = Alone()


class Together:
    """A run of several processes, those of the default group of `torch.distributed`."""

    def __init__(self, partition: TensorParallel, device: torch.device) -> None:
        self.size = partition.size
        self.partition: Partition = partition
        self._collectives = partition.collectives
        self._device = device

    def require_agreement(self, result: GenerationResult) -> None:
        told = repr([(record.request_id, record.output_ids, record.emitted_per_round) for record in result.requests])
        digest = int.from_bytes(hashlib.sha256(told.encode()).digest()[:7])
        digests = self._collectives.gather(torch.tensor([digest], device=self._device)).flatten().tolist()
        if len(set(digests)) > 1:
            raise RuntimeError(
                "the processes of this run emitted different tokens, so its results mean nothing; the likely cause is "
                "a kernel that gives other bits on another device"
            )


@contextmanager
def world_of(config: Run, folder: Path) -> Iterator[World]:
    """Join the processes that `target.tensor_parallel` asks for, until the block ends.

    Args:
        folder: folder of the run's record, into which the failure of another process is written.

    Raises:
        UserError: the machine has fewer GPUs than processes.
    """
    if config.target.tensor_parallel == 1:
        yield ALONE
        return
    own = ranks()
    device = _own_device(config, own)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    with failures_shared(own, folder):
        yield Together(TensorParallel(own.rank, own.size, TorchCollectives(own.size)), device)
        # NCCL waits for every graph that captured one of its collectives, and only this frees the run's graphs.
        gc.collect()
    dist.destroy_process_group()  # not after a failure, since it could wait for a process that has ended


def _own_device(config: Run, own: Ranks) -> torch.device:
    """Return the device. Make the GPU of this process, if any, the current one, so that `device=cuda` means it."""
    device = resolve_device(config.device)
    if device.type != "cuda":
        return device
    num_devices = torch.cuda.device_count()
    if num_devices < own.local_size:
        raise UserError(
            f"target.tensor_parallel={own.size} has {own.local_size} processes on a machine with {num_devices} GPUs; "
            "start at most one for each GPU, or use device=cpu"
        )
    torch.cuda.set_device(own.local_rank)
    return device
