"""Every option of every group composes into the schema by the command of its file."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from spec_lab.app.compose import ONLY_SET_KEYS, compose, conf_folder
from spec_lab.config.run import GROUPS
from spec_lab.core.errors import UserError
from spec_lab.options.acceptance.lossy import RelaxedThinking

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
        values = {
            key: value for key, value in yaml.safe_load(file.read_text()).items() if key not in ("defaults", "depth")
        }
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
        "engine": "lab",
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
    assert folders - {"__pycache__", "hydra"} == {*GROUPS, "experiment", "size", "debug"}


def test_a_key_forced_in_is_refused_not_dropped() -> None:
    """OmegaConf's own conversion drops it silently."""
    for key in ("drafter.max_ngram", "batchsize"):
        with pytest.raises(UserError, match=f"{key} is not read"):
            compose(["drafter=none", f"++{key}=3"])


def lines_of(experiment: str) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return a study's lines, and its sweep."""
    study = yaml.safe_load((conf_folder() / "experiment" / f"{experiment}.yaml").read_text())
    return study["study"]["lines"], study["hydra"]["sweeper"]["params"]


@pytest.mark.parametrize("line", lines_of("relaxed_thinking")[0])
def test_a_line_is_what_its_name_says(line: str) -> None:
    acceptance = compose(["experiment=relaxed_thinking", f"line={line}", "hydra.mode=RUN"]).config.acceptance
    if isinstance(acceptance, RelaxedThinking):
        assert line == f"top{acceptance.topk}_{acceptance.form}{getattr(acceptance, acceptance.form):g}"
    else:
        assert line == acceptance.name


def test_a_study_begins_with_strict_and_its_full_size_has_every_line() -> None:
    lines, params = lines_of("relaxed_thinking")
    small, full = (part.strip("'").split(",") for part in params["line"].removeprefix("${by_size:")[:-1].split("','"))
    assert small[0] == full[0] == "strict" and set(small) < set(full) == set(lines)


def test_the_size_of_an_experiment_sets_its_grid() -> None:
    small, full = (compose(["experiment=drafters", f"size={size}", "hydra.mode=RUN"]) for size in ("small", "full"))
    assert [composed.config.workload.limit for composed in (small, full)] == [9, 180]
