"""Ranks of a target are threads here, so that a split can be tested without starting processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from spec_lab.models.tensor_parallel import TensorParallel

Result = TypeVar("Result")


class Meeting:
    """Lets threads exchange tensors: each brings one, and takes all."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=30)
        self._brought = [torch.empty(0)] * size

    def exchange(self, rank: int, brought: torch.Tensor) -> torch.Tensor:
        self._brought[rank] = brought.clone()
        self.barrier.wait()
        taken = torch.stack(self._brought)
        self.barrier.wait()  # before anyone brings the next
        return taken


class ThreadCollectives:
    """The collectives of one rank among threads."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank

    def add_up(self, terms: torch.Tensor) -> None:
        terms.copy_(self._meeting.exchange(self._rank, terms).sum(dim=0))

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return self._meeting.exchange(self._rank, part)


def on_ranks(size: int, function: Callable[[TensorParallel], Result]) -> list[Result]:
    """Return what `function` returns on each rank; raise what one of them raised, but not that it was left waiting."""
    meeting = Meeting(size)

    def run(rank: int) -> Result:
        try:
            return function(TensorParallel(rank, size, ThreadCollectives(meeting, rank)))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
