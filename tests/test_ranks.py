"""The ranks of torchrun: who speaks, what is refused, and that one process is left as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

import spec_lab
import spec_lab.doctor.__main__ as doctor
from spec_lab.__main__ import main
from spec_lab.app.compose import Composed
from spec_lab.core.errors import UserError
from spec_lab.core.ranks import Ranks, ranks, refuse_unless_they_meet
from spec_lab.menu.config import RunConfig
from spec_lab.menu.refusals.run import refusals

Start = Callable[..., None]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Let this process be one of several."""

    def start(size: int, rank: int = 0) -> None:
        for name, value in {"WORLD_SIZE": size, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}.items():
            monkeypatch.setenv(name, str(value))

    return start


@cache
def plain_config() -> RunConfig:
    return spec_lab.compose(["drafter=none", "kernels=torch"]).config


def config_of(tensor_parallel: int, device: str = "cpu") -> RunConfig:
    config = plain_config()
    return replace(config, device=device, target=replace(config.target, tensor_parallel=tensor_parallel))


def test_a_process_of_its_own_is_the_only_rank(monkeypatch: pytest.MonkeyPatch, started: Start) -> None:
    assert ranks() == Ranks(0, 1, 0, 1)
    monkeypatch.setenv("RANK", "1")  # left over, or somebody else's
    assert ranks().rank == 0, "or it would print and keep nothing"
    started(4, rank=3)
    assert ranks() == Ranks(3, 4, 3, 4)
    started(0)
    assert ranks().size == 1


@pytest.mark.parametrize(
    ("variable", "value"),
    [("MASTER_PORT", None), ("MASTER_PORT", "x"), ("MASTER_PORT", "99999"), ("RANK", "2"), ("MASTER_ADDR", None)],
)
def test_processes_that_cannot_meet_are_refused_by_the_variable(
    variable: str, value: str | None, monkeypatch: pytest.MonkeyPatch, started: Start
) -> None:
    started(2)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    refuse_unless_they_meet()
    if value is None:
        monkeypatch.delenv(variable)
    else:
        monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=rf"^{variable}.*start them with torchrun, or unset WORLD_SIZE"):
        refuse_unless_they_meet()


@pytest.mark.parametrize(
    ("variable", "value"),
    [("WORLD_SIZE", "x"), ("WORLD_SIZE", "-2"), ("WORLD_SIZE", "2.0"), ("RANK", "one"), ("LOCAL_RANK", "x")],
)
def test_what_is_no_number_of_processes_is_not_one_process(
    variable: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    started: Start,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started(2)
    monkeypatch.setenv(variable, value)
    assert main(["--help"]) == 2
    assert f"refused: {variable}={value} is not a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "tensor_parallel", "fragments"),
    [
        (1, 1, ()),
        (2, 2, ()),
        (1, 2, ("target.tensor_parallel=2", "torchrun --nproc-per-node 2 -m spec_lab")),
        (2, 1, ("target.tensor_parallel=1", "WORLD_SIZE=2", "use target.tensor_parallel=2")),
        (4, 2, ("target.tensor_parallel=2", "WORLD_SIZE=4", "use target.tensor_parallel=4")),
        (1, 0, ("target.tensor_parallel=0", "at least 1")),
    ],
)
def test_there_is_a_process_for_each_part(
    started: Start, size: int, tensor_parallel: int, fragments: tuple[str, ...]
) -> None:
    started(size)
    found = refusals(config_of(tensor_parallel))
    assert len(found) == bool(fragments)
    assert all(fragment in found[0] for fragment in fragments)


def test_one_gpu_is_not_for_several_parts(started: Start) -> None:
    started(2)
    (found,) = refusals(config_of(2, "cuda:1"))
    assert "device=cuda:1" in found and "use device=cuda" in found


@pytest.mark.usefixtures("empty_folder")
def test_a_multirun_under_torchrun_is_refused(started: Start, capsys: pytest.CaptureFixture[str]) -> None:
    started(2)
    assert main(["-m", "target.tensor_parallel=2", "drafter=none,ngram"]) == 2
    assert "a multirun works in one process" in capsys.readouterr().err


def test_what_works_in_one_process_says_so(started: Start, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["target.tensor_parallel=2"]) == 2
    assert "spec_lab.doctor works in one process" in capsys.readouterr().err
    composed = Composed(config_of(2), {}, {})
    for program in (spec_lab.run, spec_lab.examine):
        with pytest.raises(UserError, match="works in one process"):
            program(composed)
