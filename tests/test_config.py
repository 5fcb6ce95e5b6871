"""Every option of every group composes into the schema, and everything that can be chosen is explained."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from spec_lab.app.compose import conf_folder, read_groups, read_keys
from spec_lab.menu import registry
from spec_lab.menu.config import RunConfig
from spec_lab.options.rules.relaxed_thinking import RelaxedThinkingConfig
from spec_lab.program.compose import (
    compose_with_hydra,
    register_schemas,
    to_config_and_options,
    to_run_config,
)
from spec_lab.program.folder import folder_name
from spec_lab.program.help import help_text
from tests import composed
from tests.uncomposed import run_of

OF_OTHER_PROGRAMS = {"train", "paper"}
SETTINGS = ("experiment", "size", "debug")
SCHEMA_GROUPS = [group for group in read_groups().values() if group.name not in SETTINGS]
OPTIONS = [(group.name, option) for group in read_groups().values() for option in group.options]
SCHEMA_OPTIONS = [(group.name, option) for group in SCHEMA_GROUPS for option in group.options if option != "auto"]
"""Without auto, in whose place another option stands once a run is composed (`tests/test_auto.py`)."""


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes_by_the_command_of_its_file(group: str, option: str) -> None:
    """With its schema, and the values of its file but for those that the command gives."""
    source = read_groups()[group].options[option]
    program, *overrides = shlex.split(source.command.removeprefix("python -m "))
    assert program == "spec_lab"
    assert f"{group}={option}" in overrides
    run_ = compose(overrides)
    config, choices = run_.config, run_.choices
    assert isinstance(config, RunConfig)
    typed = {word.partition("=")[0].removeprefix(f"{group}.") for word in overrides if word.startswith(f"{group}.")}
    assert typed or choices[group] == option or option == "auto"
    if (group, option) in SCHEMA_OPTIONS:
        part = getattr(config, group)
        assert type(part) is source.schema
        values = {key: value for key, value in source.values.items() if key not in typed}
        assert {key: getattr(part, key) for key in values} == values
        if group not in ("sampling", "prune"):  # options that only set knobs have no name
            assert part.name == option.removesuffix("_overlap")  # graph=round_overlap is the mode round with a key more


def as_written(config: DictConfig) -> object:
    """What is composed, without asking resolvers: some give another name each time."""
    return OmegaConf.to_container(config, resolve=False)


def test_what_was_composed_before_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests compose with what tests/composed.py remembers: here nothing, then all, then the parts alone."""
    some = ["drafter=ngram", "drafter.max_ngram=2", "batch_size=3", "references=[]"]
    others = ["drafter=ngram", "prune=catchup", "prune.prefill=all_rows", "target.path='a b'", "target=hf"]
    anew = []
    for overrides in (some, others):
        for memory in ("LISTS", "CONFIGS", "FRONTS", "PARTS", "FILES"):
            monkeypatch.setattr(composed, memory, {})
        anew.append(as_written(compose_with_hydra(overrides)))
    again = compose_with_hydra(some)
    assert as_written(again) == anew[0]
    again.drafter.max_ngram, again.hydra.runtime.choices.drafter = 77, "mine"
    assert [as_written(compose_with_hydra(overrides)) for overrides in (some, others)] == anew
    assert len(composed.LISTS) == 2
    composed.LISTS.clear()
    composed.CONFIGS.clear()
    assert [as_written(compose_with_hydra(overrides)) for overrides in (some, others)] == anew


def test_tests_compose_what_hydra_composes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests/composed.py` puts together what each option comes to, `tests/uncomposed.py` sets it on the defaults."""
    commands = [
        ["drafter=dflash", "drafter.weights=random", "acceptance=rejection", "sampling=sampled", "seed=5"],
        ["experiment=lossy", "size=small", "prune.prefill=all_rows", "target=hf", "target.path='a b'"],
        ["tree=dynamic", "tree.depth=4", "graph=round_overlap"],
        ["drafter=ngram", "drafter.k_schedule=[[1,2,4],[3,9,1]]", "workload=pocket", "prune=catchup"],
    ]
    written = [as_written(compose_with_hydra(overrides)) for overrides in commands]
    runs = [run_of(overrides) for overrides in commands]
    assert len(composed.HYDRAS_OWN) == 6
    for owner, name, own in composed.HYDRAS_OWN:
        monkeypatch.setattr(owner, name, own)
    hydras = [compose_with_hydra(overrides) for overrides in commands]
    assert list(map(as_written, hydras)) == written
    assert [to_config_and_options(each)[0] for each in hydras] == runs


def test_defaults_are_those_of_the_design() -> None:
    run_ = compose()
    config, choices = run_.config, run_.choices
    assert choices == {
        "target": "pocket",
        "drafter": "eagle3",
        "acceptance": "strict",
        "prune": "none",
        "graph": "eager",
        "attention": "torch",
        "workload": "pocket",
        "sampling": "greedy",
        "logger": "jsonl",
        "tree": "none",
    }
    assert config.drafter.num_draft_tokens == 3
    assert config.workload.limit == 9
    assert config.references == ["plain", "unpruned"]


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
    run_ = compose(["debug=smoke", "drafter=ngram", "repeats=2"])
    config, choices = run_.config, run_.choices
    assert (config.workload.limit, config.max_new_tokens, config.repeats) == (2, 16, 2)
    assert choices["drafter"] == "ngram"


def test_every_group_folder_is_a_group() -> None:
    folders = {path.name for path in conf_folder().iterdir() if path.is_dir()} - OF_OTHER_PROGRAMS - {"__pycache__"}
    assert folders == set(read_groups())


def test_every_schema_is_used_by_an_option() -> None:
    used = {option.schema for group in SCHEMA_GROUPS for option in group.options.values()}
    assert used | {RunConfig} == set(registry.load().schemas().values())


def test_every_field_of_the_schema_has_a_known_key() -> None:
    groups = {group.name for group in SCHEMA_GROUPS}
    nested = {"verify", "recurrent", "cache", "record"}
    expected = {field.name for field in dataclasses.fields(RunConfig)} - groups - nested
    run: Any = registry.load().schemas()["run"]()
    for name in nested:
        expected |= {f"{name}.{field.name}" for field in dataclasses.fields(getattr(run, name))}
    for group in SCHEMA_GROUPS:
        for option in group.options.values():
            assert option.schema is not None
            names = {field.name for field in dataclasses.fields(option.schema)} - {"name"}
            expected |= {f"{group.name}.{name}" for name in names}
    assert set(read_keys()) == expected


def test_help_explains_every_option_and_every_key_in_a_line() -> None:
    lines = {line.strip("* ").split()[0]: line for line in help_text().splitlines() if line.strip()}
    for group, option in OPTIONS:
        source = read_groups()[group].options[option]
        assert source.description in lines[f"{group}={option}"]
    for key in read_keys().values():
        assert key.explanation in lines[key.name]


def test_help_shows_the_default_of_each_option_where_they_differ() -> None:
    [limit] = [line for line in help_text().splitlines() if line.strip().startswith("workload.limit")]
    assert limit.endswith("[null, pocket: 9]")


def test_folder_name_has_the_choices_and_a_hash_of_the_rest() -> None:
    run_ = compose(["prune=catchup", "name=mine"])
    config, choices = run_.config, run_.choices
    name = folder_name(config, choices)
    stem, _, digest = name.rpartition("-")
    assert stem == "mine-pocket-eagle3-strict-catchup-eager"
    assert len(digest) == 8
    assert int(digest, 16) >= 0


def test_folder_name_has_what_makes_another_round_and_belongs_to_no_group() -> None:
    run_ = compose(["drafter=eagle3", "verify.budget=24", "batch_size=8", "recurrent.rollback=replay"])
    config, choices = run_.config, run_.choices
    assert folder_name(config, choices).startswith("run-pocket-eagle3-strict-none-eager-budget24-replay-")


def test_hash_follows_what_runs_and_not_where_it_is_written() -> None:
    names = {}
    for override in ("seed=0", "seed=1", "output_dir=elsewhere", "logger=wandb", "batch_size=2"):
        run_ = compose([override])
        config, choices = run_.config, run_.choices
        names[override] = folder_name(config, choices)
    assert names["seed=0"] == names["output_dir=elsewhere"] == names["logger=wandb"]
    assert len({names["seed=0"], names["seed=1"], names["batch_size=2"]}) == 3


def test_a_key_forced_in_is_refused_not_dropped() -> None:
    """OmegaConf's own conversion drops it silently; a sweep's parameters can smuggle one in past the command line."""
    config = compose(["drafter=none"]).config
    composed = OmegaConf.structured(config)
    OmegaConf.update(composed, "drafter.max_ngram", 3, force_add=True)
    with pytest.raises(ValueError, match=r"drafter\.max_ngram is not read.*choose drafter=ngram"):
        to_run_config(composed)
    OmegaConf.update(composed, "batchsize", 3, force_add=True)
    with pytest.raises(ValueError, match=r"batchsize is not read.*leave it out"):
        to_run_config(composed)


def sweep_params(file: Path) -> dict[str, list[str]]:
    params = yaml.safe_load(file.read_text()).get("hydra", {}).get("sweeper", {}).get("params", {})
    return {key: [value.strip() for value in str(values).split(",")] for key, values in params.items()}


GRIDS = sorted((conf_folder() / "experiment").glob("relaxed_thinking/grid/*.yaml"))
POINT = "experiment/relaxed_thinking/point@_global_"


@pytest.mark.parametrize("grid", GRIDS, ids=lambda path: f"{path.parents[1].name}-{path.stem}")
def test_points_of_a_grid_exist_and_begin_with_strict(grid: Path) -> None:
    points = {path.stem for path in (grid.parents[1] / "point").glob("*.yaml")}
    named = sweep_params(grid)[POINT]
    assert named[0] == "strict"
    assert set(named) <= points
    assert grid.stem != "full" or set(named) == points


@pytest.mark.parametrize("point", sorted((conf_folder() / "experiment" / "relaxed_thinking" / "point").glob("*.yaml")))
def test_a_point_is_what_its_name_and_its_command_say(point: Path) -> None:
    command, _ = [line for line in point.read_text().splitlines() if line.startswith("# ")][1:3]
    named = compose(command.removeprefix("# python -m spec_lab ").split()).config
    register_schemas(registry.load())
    with initialize_config_dir(str(conf_folder().absolute()), version_base="1.3"):
        composed = compose("config", overrides=["experiment=relaxed_thinking", f"{POINT}={point.stem}"])
    config = to_run_config(composed)
    assert config.acceptance == named.acceptance
    if isinstance(config.acceptance, RelaxedThinkingConfig):
        value = getattr(config.acceptance, config.acceptance.form)
        assert point.stem == f"top{config.acceptance.topk}_{config.acceptance.form}{value:g}"
    else:
        assert point.stem == config.acceptance.name


def test_the_size_of_an_experiment_sets_its_grid() -> None:
    run_ = compose(["experiment=relaxed_thinking"])
    small, choices = run_.config, run_.choices
    full = compose(["experiment=relaxed_thinking", "size=full"]).config
    assert choices["size"] == "small"
    assert (small.workload.limit, full.workload.limit) == (84, None)
    assert full.references == []
    drafters = [compose(["experiment=drafters", f"size={size}"]).config for size in ("small", "full")]
    assert [config.workload.limit for config in drafters] == [9, 180]
    for overrides in (["size=full"], ["experiment=drafters_quick", "size=full"]):
        with pytest.raises(
            ValueError, match=r"size=full: only experiments .*; add experiment=adaptive_k \(or batch_scaling, drafters"
        ):
            compose(overrides)
