"""Names of groups: an option's where all its knobs stand, else the knobs that differ; no two of them alike."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from spec_lab.program.compose import compose_run, name_options
from spec_lab.program.dry_run import describe
from spec_lab.program.folder import folder_name
from spec_lab.program.labels import MAX_LENGTH, name_groups
from spec_lab.program.options import read_groups
from spec_lab.record.measured import RunInfo
from tests.fake_runs import PROVENANCE
from tests.uncomposed import run_of

STALE = [[], ["graph.metadata=stale"]]


def name_of(group: str, *overrides: str) -> str:
    return compose_run(overrides)[1][group]


@pytest.mark.parametrize(
    ("overrides", "group", "name"),
    [
        (["prune.catchup=pre_attention"], "prune", "all_rows+pre_attention"),
        (
            ["prune=prefill", "prune.prefill=all_rows", "prune.catchup=post_attention"],
            "prune",
            "all_rows+post_attention",
        ),
        (["prune.prefill=last_row", "prune.catchup=pre_attention"], "prune", "catchup"),
        (["prune=catchup", "prune.catchup=none"], "prune", "prefill"),
        (["sampling.temperature=0.7"], "sampling", "temperature0.7"),
        (["sampling.temperature=1"], "sampling", "sampled"),
        (["sampling=sampled", "sampling.temperature=0"], "sampling", "greedy"),
        (["sampling.temperature=2"], "sampling", "temperature2"),
        (["sampling.top_k=5"], "sampling", "temperature0+top_k5"),
        (["sampling=sampled", "sampling.top_p=0.95"], "sampling", "temperature1+top_p0.95"),
        (["graph=round", "graph.overlap=true"], "graph", "round_overlap"),
        (["graph=round_overlap", "graph.overlap=false"], "graph", "round"),
        (["graph=round", "graph.overlap=true", "graph.metadata=stale"], "graph", "round_overlap+metadata_stale"),
        (["graph=full_loop", "graph.verify=false"], "graph", "full_loop+verify_false"),
        (["graph=full_loop", "graph.verify=true"], "graph", "full_loop"),
        (["acceptance=relaxed_thinking", "acceptance.topk=3"], "acceptance", "relaxed_thinking+topk3"),
        (["acceptance=relaxed_thinking", "acceptance.topk=10"], "acceptance", "relaxed_thinking"),
        (
            ["acceptance=relaxed_thinking", "acceptance.form=ratio", "acceptance.ratio=0.3"],
            "acceptance",
            "relaxed_thinking+form_ratio+ratio0.3",
        ),
        (["acceptance=rejection", "acceptance.method=block"], "acceptance", "rejection+method_block"),
        (
            ["acceptance=synthetic", "acceptance.mean_length=null", "acceptance.rates=[0.7,0.5,0.2]"],
            "acceptance",
            "synthetic+mean_length_null+rates_0.7,0.5,0.2",
        ),
        (["drafter.num_draft_tokens=5"], "drafter", "eagle3"),
        (["drafter.window=64"], "drafter", "eagle3+window64"),
        (["drafter.path=/heads/of/mine/head-7/"], "drafter", "eagle3+head-7"),
        (["target=hf", "target.path=/models/Qwen3-1.7B"], "target", "hf+Qwen3-1.7B"),
        (["workload.limit=null"], "workload", "pocket+limit_null"),
        (["workload.limit=9"], "workload", "pocket"),
        (["logger=wandb", "logger.project=mine"], "logger", "wandb"),
    ],
)
def test_knobs_that_differ_are_named(overrides: list[str], group: str, name: str) -> None:
    assert name_of(group, *overrides) == name


def test_no_two_configurations_of_a_group_have_one_name() -> None:
    """Every value of some knobs with every other, from every option that has them."""
    cases = {
        "prune": list(
            itertools.product(
                [f"prune={option}" for option in read_groups()["prune"].options],
                [[f"prune.prefill={value}"] for value in ("all_rows", "last_row")],
                [[f"prune.catchup={value}"] for value in ("none", "post_attention", "pre_attention")],
            )
        ),
        "graph": [
            *itertools.product(["graph=round", "graph=round_overlap"], [[], ["graph.overlap=true"]], STALE),
            *itertools.product(["graph=full_loop", "graph=split_seed"], [[], ["graph.verify=false"]], STALE),
        ],
        "sampling": list(
            itertools.product(
                ["sampling=greedy", "sampling=sampled"],
                [[], ["sampling.temperature=0.1"], ["sampling.temperature=1"]],
                [[], ["sampling.top_k=1"], ["sampling.top_k=11"], ["sampling.top_p=0.1"]],
            )
        ),
    }
    for group, combinations in cases.items():
        found: dict[str, object] = {}
        for option, first, second in combinations:
            config = run_of([option, *first, *second])
            names = name_options(config, {group: option.partition("=")[2]})
            part = getattr(config, group)
            assert found.setdefault(names[group], part) == part, names[group]
        assert len(found) > 3


def test_the_folder_the_dry_run_and_the_record_say_the_same() -> None:
    config, names = compose_run(
        ["sampling.temperature=0.7", "graph=full_loop", "graph.verify=false", "drafter.window=9"]
    )
    assert folder_name(config, names).startswith("run-pocket-eagle3+window9-strict-none-full_loop+verify_false-")
    lines = {line.split()[0]: line.split() for line in describe(config, names, []).splitlines()}
    assert lines["graph"][1] == "full_loop+verify_false" and lines["sampling"][1] == "temperature0.7"
    assert lines["graph"][2] == "verify=false"
    assert RunInfo("run", names, {}, PROVENANCE, "").choices["drafter"] == "eagle3+window9"


@pytest.mark.parametrize("folder", ["a" * 300, "with space", "ü\n", "a'b;c", "x+y", "."])
def test_a_name_is_fit_for_a_folder(folder: str, tmp_path: Path) -> None:
    path = f"/models/{folder}".replace("'", "\\'").replace("\n", "\\n")
    config, names = compose_run(["target=hf", f"target.path='{path}'", "drafter=ngram"])
    assert len(names["target"]) <= MAX_LENGTH and names["target"].startswith("hf+")
    assert "/" not in names["target"] and names["target"].isprintable() and " " not in names["target"]
    (tmp_path / folder_name(config, names)).mkdir()


def test_long_names_are_cut_and_told_apart_by_the_hash() -> None:
    rates = [f"acceptance.rates=[{','.join(['0.123456789'] * 8)},{last}]" for last in ("0.1", "0.01")]
    common = ["acceptance=synthetic", "drafter.num_draft_tokens=9", "target=hf", f"target.path=/m/{'t' * 200}"]
    runs = [compose_run([*common, "acceptance.mean_length=null", rate]) for rate in rates]
    (first, first_names), (second, second_names) = runs
    assert first_names["acceptance"] != second_names["acceptance"]
    assert folder_name(first, first_names) != folder_name(second, second_names)
    assert max(len(folder_name(*run)) for run in runs) <= 140


@pytest.mark.parametrize(("builder", "name"), [("mine", "my_option"), ("eagle3", "eagle3+window64")])
def test_an_option_from_a_folder_of_the_users_own(builder: str, name: str) -> None:
    """`--config-dir DIR drafter=my_option`: no option here, so it is called by what it builds, if anything does."""
    config, _ = compose_run(["drafter.window=64"])
    config.drafter.name = builder
    assert name_groups(config, {"drafter": "my_option"}, read_groups()) == {"drafter": name}
