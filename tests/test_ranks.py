"""The ranks of torchrun: who speaks, what is refused, and that one process is left as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

import spec_lab
from spec_lab.config.checks import problems
from spec_lab.config.run import Run
from spec_lab.core.ranks import Ranks, ranks

Start = Callable[..., None]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Let this process be one of several."""

    def start(size: int, rank: int = 0) -> None:
        for name, value in {"WORLD_SIZE": size, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}.items():
            monkeypatch.setenv(name, str(value))

    return start


@cache
def plain_config() -> Run:
    return spec_lab.compose(["drafter=none", "kernels=torch"]).config


def config_of(tensor_parallel: int, device: str = "cpu") -> Run:
    config = plain_config()
    return replace(config, device=device, target=replace(config.target, tensor_parallel=tensor_parallel))


def test_a_process_of_its_own_is_the_only_rank(monkeypatch: pytest.MonkeyPatch, started: Start) -> None:
    assert ranks() == Ranks(0, 1, 0)
    monkeypatch.setenv("RANK", "1")  # left over, or somebody else's
    assert ranks().rank == 0, "or it would print and keep nothing"
    started(4, rank=3)
    assert ranks() == Ranks(3, 4, 3)
    started(0)
    assert ranks().size == 1


@pytest.mark.parametrize(
    ("size", "tensor_parallel", "fragments"),
    [
        (1, 1, ()),
        (2, 2, ()),
        (1, 2, ("target.tensor_parallel=2", "torchrun --nproc-per-node 2 -m spec_lab")),
        (2, 1, ("target.tensor_parallel=1", "2 processes", "use target.tensor_parallel=2")),
        (4, 2, ("target.tensor_parallel=2", "4 processes", "use target.tensor_parallel=4")),
        (1, 0, ("target.tensor_parallel=0", "at least 1")),
    ],
)
def test_there_is_a_process_for_each_part(
    started: Start, size: int, tensor_parallel: int, fragments: tuple[str, ...]
) -> None:
    started(size)
    found = list(problems(config_of(tensor_parallel)))
    assert bool(found) == bool(fragments)
    assert all(fragment in found[0] for fragment in fragments)
