"""Checks the number of processes. Each function is a check, as in `menu.refusals.run`."""

from __future__ import annotations

from collections.abc import Callable

from spec_lab.checkpoints.can_split import problem_of_split
from spec_lab.core.errors import UserError
from spec_lab.core.ranks import ranks
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import RunConfig
from spec_lab.menu.refusals.weights import model_of


def as_many_ranks(chosen: Chosen) -> str | None:
    """There must be exactly one process for each part of the target."""
    wanted, started = chosen.config.target.tensor_parallel, ranks().size
    if wanted == started or wanted < 1:
        return None
    if started == 1:
        return (
            f"target.tensor_parallel={wanted} needs {wanted} processes, but this is one; start it with torchrun "
            f"--nproc-per-node {wanted} -m spec_lab, or use target.tensor_parallel=1"
        )
    return (
        f"target.tensor_parallel={wanted} is not the {started} processes that were started (WORLD_SIZE={started}); "
        f"use target.tensor_parallel={started}, or start {wanted}"
    )


def ranks_choose_their_device(chosen: Chosen) -> str | None:
    """Processes that split a target must not all be given one GPU, which would have to hold all parts."""
    config = chosen.config
    if config.target.tensor_parallel == 1 or ":" not in config.device:
        return None
    return (
        f"device={config.device} is one GPU for target.tensor_parallel={config.target.tensor_parallel} processes; use "
        "device=cuda, so that each takes its own GPU"
    )


def target_can_be_split(chosen: Chosen) -> str | None:
    """If the target is split, every layer in config.json must allow it. An unreadable config.json is refused later."""
    size = chosen.config.target.tensor_parallel
    model = None if size < 2 else model_of(chosen)
    plans = () if model is None else model.layers
    return next((problem for plan in plans if (problem := problem_of_split(plan, size))), None)


def refuse_split(config: RunConfig, program: str) -> None:
    """Raise UserError if `program`, which runs in one process, is asked to split its target."""
    if config.target.tensor_parallel != 1:
        raise UserError(
            f"target.tensor_parallel={config.target.tensor_parallel}: {program} works in one process; "
            "use target.tensor_parallel=1, or do a run with torchrun -m spec_lab"
        )


RANK_CHECKS: tuple[Callable[[Chosen], str | None], ...] = (
    ranks_choose_their_device,
    target_can_be_split,
    as_many_ranks,
)
