"""A world is the processes over which a run's target is split: one, or those of `torchrun`.

They run the same program on the same requests, and wait for one another in collective operations. So all must emit the
same tokens, which is checked. If one fails, torchrun ends the others.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from spec_lab.build.models import resolve_device
from spec_lab.config.run import Run
from spec_lab.core.ranks import ranks
from spec_lab.core.results import GenerationResult
from spec_lab.models.collectives import Collectives
from spec_lab.models.partition import WHOLE, Partition
from spec_lab.models.tensor_parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class World:
    """The processes of a run, as the run uses them.

    Attributes:
        partition: this process's share of the target.
        size: the number of processes.
    """

    partition: Partition = WHOLE
    size: int = 1

    def require_agreement(self, result: GenerationResult, device: torch.device) -> None:
        """Raise RuntimeError if another process generated something else."""
        if not isinstance(self.partition, TensorParallel):
            return
        told = repr([(record.request_id, record.output_ids, record.emitted_per_round) for record in result.requests])
        digest = int.from_bytes(hashlib.sha256(told.encode()).digest()[:7])
        digests = self.partition.collectives.gather(torch.tensor([digest], device=device)).flatten().tolist()
        if len(set(digests)) > 1:
            raise RuntimeError(
                "the processes of this run emitted different tokens, so its results mean nothing; the likely cause is "
                "a kernel that gives other bits on another device"
            )


ALONE = World()


@contextmanager
def world_of(config: Run) -> Iterator[World]:
    """Join the processes that `target.tensor_parallel` asks for, until the block ends."""
    if config.target.tensor_parallel == 1:
        yield ALONE
        return
    own, is_cuda = ranks(), resolve_device(config.device).type == "cuda"
    if is_cuda:
        torch.cuda.set_device(own.local_rank)  # which `device=cuda` then means
    dist.init_process_group("nccl" if is_cuda else "gloo")
    yield World(TensorParallel(own.rank, own.size, Collectives(own.size)), own.size)
    # NCCL waits for every graph that captured one of its collectives, and only this frees the run's graphs.
    gc.collect()
    dist.destroy_process_group()  # not after a failure, since it could wait for a process that has ended
