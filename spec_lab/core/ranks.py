"""The ranks of a run: the processes that `torchrun` started, as numbered by its environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass

from spec_lab.core.errors import UserError


@dataclass(frozen=True, slots=True)
class Ranks:
    """The rank of this process among those of its run.

    Attributes:
        rank: from 0; process 0 records and prints.
        size: the number of processes.
        local_rank: the rank among the processes of this machine, which is also the index of its GPU.
        local_size: the number of processes on this machine.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int


def ranks() -> Ranks:
    """Read the environment variables; without them this process is the only one.

    Raises:
        UserError: one of them is not a whole number from 0 on.
    """
    size = max(1, _number("WORLD_SIZE", 1))
    if size == 1:
        return Ranks(0, 1, 0, 1)
    return Ranks(_number("RANK", 0), size, _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", size))


def refuse_unless_they_meet() -> None:
    """Raise UserError if a variable that the processes need to connect is missing or invalid."""
    own = ranks()
    bounds = {"RANK": own.size - 1, "MASTER_PORT": 2**16 - 1}
    for name, most in bounds.items():
        value = os.environ.get(name, "")
        if not value.isdecimal() or int(value) > most:
            raise UserError(
                f"{name}={value} must be from 0 to {most} for WORLD_SIZE={own.size} processes to connect; start them "
                "with torchrun, or unset WORLD_SIZE for one"
            )
    if not os.environ.get("MASTER_ADDR"):
        raise UserError(
            "MASTER_ADDR, by which processes connect, is not set; start them with torchrun, or unset WORLD_SIZE"
        )


def _number(variable: str, alone: int) -> int:
    value = os.environ.get(variable, "")
    if value and not value.isdecimal():
        raise UserError(
            f"{variable}={value} is not a whole number from 0 on; start processes with torchrun, or unset {variable}"
        )
    return int(value or alone)
