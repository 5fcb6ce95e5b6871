"""The sweep files that are shipped: valid for W&B, understood by a run, and started alike by W&B's agent and by us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from spec_lab.menu.refusals.run import refusals
from spec_lab.program.compose import compose_run
from spec_lab.sweep.command import as_overrides
from spec_lab.sweep.file import read_sweep_file
from spec_lab.sweep.library import quiet
from spec_lab.sweep.plain import to_plain
from spec_lab.sweep.plan import plan_sweep
from spec_lab.sweep.space import check_space

pytestmark = pytest.mark.usefixtures("search_code")

FILES = sorted((Path(__file__).parents[1] / "sweeps").glob("*.yaml"))


def of_shipped_files(test: Any) -> Any:
    return pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)(test)


def test_every_method_is_shown() -> None:
    assert {read_sweep_file(path).method for path in FILES} == {"grid", "random", "bayes"}


@of_shipped_files
def test_wandbs_own_validation_accepts_it(path: Path) -> None:
    with quiet():
        from sweeps import schema_violations_from_proposed_config

        config = yaml.safe_load(path.read_text())
        config.pop("run_cap", None)  # known to the server, not to the schema of the search
        assert schema_violations_from_proposed_config(config) == []


@of_shipped_files
def test_every_value_is_one_that_a_run_takes(path: Path) -> None:
    check_space(read_sweep_file(path), [])


@of_shipped_files
def test_it_opens_with_its_command_and_what_it_is(path: Path) -> None:
    first, second, *_ = path.read_text().splitlines()
    assert first.startswith(f"# python -m spec_lab.sweep sweeps/{path.name}")
    assert len(second) > 20


@of_shipped_files
def test_its_first_runs_compose_and_are_not_refused(path: Path, empty_folder: Path) -> None:
    sweep = plan_sweep(path, [], None, seed=0, fresh=False)
    for number in range(2):
        parameters = sweep.search.propose(number, [])
        assert parameters is not None
        config, _ = compose_run(sweep.overrides_of(parameters))
        assert refusals(config) == []


@of_shipped_files
def test_wandbs_agent_starts_the_same_run(path: Path, empty_folder: Path) -> None:
    """Its command with the macros replaced by W&B's own code, beside what is run here."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    sweep = plan_sweep(path, [], None, seed=0, fresh=False)
    parameters = sweep.search.propose(0, [])
    assert parameters is not None
    macros = create_sweep_command_args({"args": {name: {"value": value} for name, value in parameters.items()}})
    macros |= {"env": ["/usr/bin/env"], "interpreter": ["python"]}
    command: list[str] = []
    for item in create_sweep_command(yaml.safe_load(path.read_text())["command"]):
        command += macros[item[2:-1]] if item.startswith("${") else [item]
    assert command[:4] == ["/usr/bin/env", "python", "-m", "spec_lab"]
    assert sorted(command[4:]) == sorted(sweep.overrides_of(parameters))


def test_a_multiple_of_a_quantum_has_no_more_digits_than_it() -> None:
    assert [to_plain(7 * 0.05, 0.05), to_plain(3 * 0.1, 0.1), to_plain(3e-4 + 1e-19, 1e-4)] == [0.35, 0.3, 3e-4]
    assert (to_plain(30.0, 10), to_plain(7, 0.5), to_plain("a", 0.5), to_plain(7 * 0.05)) == (30.0, 7, "a", 7 * 0.05)


@of_shipped_files
def test_no_proposal_has_digits_that_nobody_asked_for(path: Path, empty_folder: Path) -> None:
    file = read_sweep_file(path)
    quantised = {name for name, parameter in file.parameters.items() if "q" in parameter}
    sweep = plan_sweep(path, [], None, seed=0, fresh=False)
    proposals = [sweep.search.propose(number, []) or {} for number in range(12)]
    assert all(len(str(proposal[name])) <= 4 for proposal in proposals for name in quantised)


def test_overrides_are_written_as_wandbs_agent_writes_them() -> None:
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    parameters = {"a": 1, "b.c": 1e-07, "d": True, "e": "text", "f": ["x", "y"], "g": 0.30000000000000004}
    theirs = create_sweep_command_args({"args": {name: {"value": value} for name, value in parameters.items()}})
    assert as_overrides(parameters) == theirs["args_no_hyphens"]
