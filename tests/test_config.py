"""Every option of every group composes into the schema by the command of its file."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from spec_lab.app.compose import ONLY_SET_KEYS, compose, conf_folder
from spec_lab.config.run import GROUPS
from spec_lab.core.errors import UserError
from spec_lab.options.acceptance.relaxed_thinking import RelaxedThinking

OF_OTHER_PROGRAMS = {"train", "paper"}
OPTIONS = [file for group in (*GROUPS, *ONLY_SET_KEYS) for file in sorted((conf_folder() / group).glob("*.yaml"))]


def named(file: Path) -> str:
    return f"{file.parent.name}={file.stem}"


def command_of(file: Path) -> list[str]:
    """The overrides in the first comment of a file."""
    comments = [line.removeprefix("# ") for line in file.read_text().splitlines() if line.startswith("# ")]
    command, description = [line for line in comments if not line.startswith("@package")][:2]
    program, *overrides = shlex.split(command.removeprefix("python -m "))
    assert program == "spec_lab" and description
    return overrides


@pytest.mark.parametrize("file", OPTIONS, ids=named)
def test_every_option_composes_by_the_command_of_its_file(file: Path) -> None:
    """With the values of its file but for those that the command gives."""
    group, option, overrides = file.parent.name, file.stem, command_of(file)
    assert f"{group}={option}" in overrides
    composed = compose([*overrides, "hydra.mode=RUN"])
    typed = {word.partition("=")[0].removeprefix(f"{group}.") for word in overrides if word.startswith(f"{group}.")}
    assert typed or composed.choices[group] == option or option == "auto"
    if group in GROUPS:
        part = getattr(composed.config, group)
        values = {key: value for key, value in yaml.safe_load(file.read_text()).items() if key != "defaults"}
        assert {key: getattr(part, key) for key in values.keys() - typed} == {
            key: value for key, value in values.items() if key not in typed
        }


def test_defaults_are_those_of_the_design() -> None:
    composed = compose()
    assert composed.choices == {
        "target": "pocket",
        "drafter": "eagle3",
        "acceptance": "strict",
        "prune": "none",
        "graph": "auto",
        "attention": "auto",
        "workload": "pocket",
        "sampling": "greedy",
        "logger": "jsonl",
        "tree": "none",
    }
    assert composed.config.drafter.num_draft_tokens == 3
    assert composed.config.workload.limit == 9
    assert composed.config.references == ["plain", "unpruned"]


@pytest.mark.parametrize(
    ("preset", "prefill", "catchup"),
    [
        ("none", "all_rows", "none"),
        ("prefill", "last_row", "none"),
        ("post_attention", "last_row", "post_attention"),
        ("catchup", "last_row", "pre_attention"),
    ],
)
def test_prune_presets_set_both_knobs(preset: str, prefill: str, catchup: str) -> None:
    config = compose([f"prune={preset}"]).config
    assert (config.prune.prefill, config.prune.catchup) == (prefill, catchup)


def test_debug_smoke_is_cheap_and_leaves_what_was_chosen() -> None:
    composed = compose(["debug=smoke", "drafter=ngram", "repeats=2"])
    config = composed.config
    assert (config.workload.limit, config.max_new_tokens, config.repeats) == (2, 16, 2)
    assert composed.choices["drafter"] == "ngram"


def test_every_group_folder_is_a_group() -> None:
    folders = {path.name for path in conf_folder().iterdir() if path.is_dir()} - OF_OTHER_PROGRAMS
    assert folders - {"__pycache__", "hydra"} == {*GROUPS, *ONLY_SET_KEYS}


def test_a_key_forced_in_is_refused_not_dropped() -> None:
    """OmegaConf's own conversion drops it silently."""
    for key in ("drafter.max_ngram", "batchsize"):
        with pytest.raises(UserError, match=f"{key} is not read"):
            compose(["drafter=none", f"++{key}=3"])


def sweep_params(file: Path) -> dict[str, list[str]]:
    params = yaml.safe_load(file.read_text()).get("hydra", {}).get("sweeper", {}).get("params", {})
    return {key: [value.strip() for value in str(values).split(",")] for key, values in params.items()}


GRIDS = sorted((conf_folder() / "experiment").glob("relaxed_thinking/grid/*.yaml"))
POINT = "experiment/relaxed_thinking/point@_global_"


@pytest.mark.parametrize("grid", GRIDS, ids=lambda path: f"{path.parents[1].name}-{path.stem}")
def test_points_of_a_grid_exist_and_begin_with_strict(grid: Path) -> None:
    points = {path.stem for path in (grid.parents[1] / "point").glob("*.yaml")}
    listed = sweep_params(grid)[POINT]
    assert listed[0] == "strict"
    assert set(listed) <= points
    assert grid.stem != "full" or set(listed) == points


@pytest.mark.parametrize("point", sorted((conf_folder() / "experiment" / "relaxed_thinking" / "point").glob("*.yaml")))
def test_a_point_is_what_its_name_and_its_command_say(point: Path) -> None:
    config = compose(["experiment=relaxed_thinking", f"{POINT}={point.stem}", "hydra.mode=RUN"]).config
    assert config.acceptance == compose(command_of(point)).config.acceptance
    if isinstance(config.acceptance, RelaxedThinking):
        value = getattr(config.acceptance, config.acceptance.form)
        assert point.stem == f"top{config.acceptance.topk}_{config.acceptance.form}{value:g}"
    else:
        assert point.stem == config.acceptance.name


def test_the_size_of_an_experiment_sets_its_grid() -> None:
    small, full = (compose(["experiment=drafters", f"size={size}", "hydra.mode=RUN"]) for size in ("small", "full"))
    assert small.choices["size"] == "small"
    assert [composed.config.workload.limit for composed in (small, full)] == [9, 180]
