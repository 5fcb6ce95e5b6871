"""The sweep files that are shipped, each as W&B's agent starts its runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import spec_lab.record.summary  # noqa: F401  defines the metrics
from spec_lab.app.compose import compose
from spec_lab.config.checks import problems
from spec_lab.record.summary import definitions

FILES = sorted((Path(__file__).parents[1] / "sweeps").glob("*.yaml"))
FIRST, LAST = 0, -1


def value_at(parameter: dict[str, Any], end: int) -> Any:
    """Return one end of a parameter's space."""
    if "value" in parameter:
        return parameter["value"]
    return (parameter.get("values") or [parameter["min"], parameter["max"]])[end]


def command_at(sweep: dict[str, Any], end: int) -> list[str]:
    """Return the command of a run at one end of the space. W&B's own code writes the parameters."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    values = {name: {"value": value_at(parameter, end)} for name, parameter in sweep["parameters"].items()}
    macros = {"${env}": ["/usr/bin/env"], "${interpreter}": ["python"]}
    macros |= {f"${{{name}}}": words for name, words in create_sweep_command_args({"args": values}).items()}
    return [word for item in sweep["command"] for word in macros.get(item, [item])]


@pytest.mark.parametrize("end", [FIRST, LAST])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_both_ends_of_the_space_compose(path: Path, end: int, empty_folder: Path) -> None:
    command = command_at(yaml.safe_load(path.read_text()), end)
    assert command[:4] == ["/usr/bin/env", "python", "-m", "spec_lab"]
    config = compose(command[4:]).config
    assert list(problems(config)) == []
    assert config.logger.name == "wandb", "else the sweep gets no metric"  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_metric_is_a_number_that_a_run_logs(path: Path) -> None:
    sweep = yaml.safe_load(path.read_text())
    assert sweep["metric"]["name"].removeprefix("summary.") in definitions() and sweep["metric"]["goal"] in (
        "minimize",
        "maximize",
    )
    assert sweep["method"] == "grid" or sweep["run_cap"] > 0, "a random or a Bayesian search has no end by itself"
