"""The ranks of a run: the processes that `torchrun` started, as numbered by its environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ranks:
    """The rank of this process among those of its run.

    Attributes:
        rank: from 0; process 0 records and prints.
        size: the number of processes.
        local_rank: the rank among the processes of this machine, which is also the index of its GPU.
    """

    rank: int
    size: int
    local_rank: int


def ranks() -> Ranks:
    """Read the environment variables; without them this process is the only one."""
    size = max(1, _number("WORLD_SIZE", 1))
    if size == 1:
        return Ranks(0, 1, 0)
    return Ranks(_number("RANK", 0), size, _number("LOCAL_RANK", 0))


def _number(variable: str, alone: int) -> int:
    return int(os.environ.get(variable) or alone)
