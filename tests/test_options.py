"""Every option of every group, as the command line composes it, through run and doctor, on a tiny pair."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spec_lab.app.compose import compose, conf_folder
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.packaged import PACKAGED
from spec_lab.config.checks import problems
from spec_lab.config.option import options
from spec_lab.config.run import GROUPS
from spec_lab.doctor.__main__ import main as examine
from spec_lab.measure.runner import record_run
from spec_lab.workloads.prompt_files import PROMPTS_FOLDER
from tests import stand_in_gym
from tests.covering import each_value
from tests.tiny_assistant import make_tiny_assistant
from tests.tiny_blocks import TINY_PRESETS, make_tiny_p_eagle, write_block
from tests.tiny_mtp import make_tiny_mtp
from tests.tiny_runs import make_runnable_pair

SHIPPED = {"pocket": "eagle3", "pocket_hybrid": "mtp_eagle", "pocket_gemma": "frozen_kv", "pocket_moe": "mtp_eagle"}
"""The shipped targets, and a drafter that is shipped for each."""
OPTIONS = [(group, file.stem) for group in GROUPS for file in sorted((conf_folder() / group).glob("*.yaml"))]
SHAPES = [
    (group, option) for group, option in OPTIONS if group == "target" and option not in (*SHIPPED, *PACKAGED, "hf")
]
"""Targets of billions of parameters, too large to build here: they are composed alone."""

INTERPRETED = ("attention", "triton")
SHORT_PROMPTS = ["workload=random_ids", "workload.prompt_tokens=8", "workload.num_requests=2"]
SAMPLED = ["acceptance=rejection", "sampling=sampled", "drafter.draft_sampling=distribution"]
NEEDS = {
    ("workload", "reasoning_gym"): ["workload.tasks=[chain_sum]"],
    ("acceptance", "rejection"): SAMPLED,
    **{("acceptance", rule): ["sampling=sampled"] for rule in ("typical", "threshold", "cascade", "mentored", "fuzzy")},
    ("workload", "jsonl"): [f"workload.path={PROMPTS_FOLDER / 'dates.jsonl'}"],
    ("workload", "spec_bench"): ["workload.path=question.jsonl"],
    ("logger", "wandb"): ["logger.mode=disabled"],
    INTERPRETED: [*SHORT_PROMPTS, "max_new_tokens=4"],
}
CHEAP = [
    *("max_new_tokens=6", "repeats=1", "warmup_requests=0", "profile_rounds=0", "num_threads=1", "batch_size=2"),
    *("references=[plain]", "workload.limit=2", "device=cpu"),
]
QUESTIONS = "\n".join(f'{{"question_id": {i}, "category": "writing", "turns": ["Hello {i}", "And?"]}}' for i in (1, 2))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A pair with room for the shipped prompts, since its tokenizer spends a token a character."""
    return make_runnable_pair(tmp_path_factory.mktemp("pair"), max_position_embeddings=8192)


@pytest.fixture(scope="module")
def drafter_folders(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write weights for the tiny target; return their folders by the drafter that reads them."""
    target = read_model_config(pair[0])
    folders = {name: tmp_path_factory.mktemp(name) for name in ("mtp_eagle", "mtp_vanilla", "frozen_kv")}
    make_tiny_mtp(folders["mtp_eagle"], "ours", target)
    make_tiny_mtp(folders["mtp_vanilla"], "ours", target, num_modules=3)
    make_tiny_assistant(folders["frozen_kv"], target)
    blocks = {name: tmp_path_factory.mktemp(name) for name in TINY_PRESETS}
    for name, block in TINY_PRESETS.items():
        write_block(blocks[name], replace(block, outputs=(0, 2)), target)
    blocks["p_eagle"] = tmp_path_factory.mktemp("p_eagle")
    make_tiny_p_eagle(blocks["p_eagle"], target)
    return folders | blocks | {"eagle3": pair[1], "hybrid": pair[1], "draft_model": pair[0]}


def options_of(group: str, *left_out: str) -> list[tuple[str, str]]:
    """Options of a group that a run here can have: `auto` is one of the others, packages have tests of their own."""
    return [entry for entry in OPTIONS if entry[0] == group and entry[1] not in ("auto", *PACKAGED, *left_out)]


REFERENCES = [("references", names) for names in ("[plain,unpruned]", "[]", "[plain]", "[unpruned]")]
BESIDE_RULES = (
    *("hybrid", "mtp_eagle", "draft_model", "mtp_vanilla", "frozen_kv", "eagle3", "dflash", "p_eagle", "random"),
    *("ngram", "suffix"),
)
"""Drafters, each beside one of the rules in their order; the others have rows of their own."""
ASKED_ELSEWHERE = ("outputs", "user_turns", "replay")
"""They need a finished run, or a chat template: tests/test_own_turns.py, tests/test_replay.py."""
RULE_ROWS = each_value(
    options_of("acceptance", *ASKED_ELSEWHERE),
    *map(options_of, ("graph", "prune")),
    options_of("workload", *ASKED_ELSEWHERE),
    options_of("logger"),
    [("drafter", name) for name in BESIDE_RULES],
)
DRAFTER_ROWS = each_value(
    options_of("drafter", *BESIDE_RULES), options_of("sampling", "sampled"), options_of("prune")[::-1], REFERENCES
)
TREE_ROWS = [
    (("tree", "dynamic"), ("drafter", "frozen_kv"), ("attention", "torch")),
    (("tree", "static"), ("drafter", "mtp_eagle")),
]
TARGET_ROWS = [
    (("target", name), ("drafter", SHIPPED[name])) for _, name in options_of("target", "hf") if name in SHIPPED
]
RUN_ROWS = [
    *RULE_ROWS,
    *DRAFTER_ROWS,
    *TREE_ROWS,
    *TARGET_ROWS,
]
PRUNING = (
    [("prune.prefill", name) for name in options("prune.prefill")],
    [("prune.catchup", name) for name in options("prune.catchup")],
)
ON_HOST = [name for name, option in options("drafter").items() if option.drafts_on_host]
"""The doctor refuses them: it examines the K drafts that wait on the device."""
EXAMINED_ELSEWHERE = ("eagle3", "mtp_eagle", "mtp_vanilla", "frozen_kv", "draft_model", "random", "oracle")
"""By tests/test_doctor*.py, which ask for what is found."""
OTHER_PRESETS = ("dflash2", "domino", "dspark")
"""Blocks as the doctor reads them in dflash and lilicorr."""
EXAMINED_GRAPHS = ("eager", "full_loop", "round_overlap")
EXAMINED_ROWS = [
    *each_value([("acceptance", "rejection")], [("graph", name) for name in EXAMINED_GRAPHS], *PRUNING),
    *each_value(options_of("drafter", "none", *EXAMINED_ELSEWHERE, *ON_HOST, *OTHER_PRESETS)),
    (INTERPRETED, ("tree", "none")),
]
"""No other rule, since the doctor puts strict acceptance in its place."""
Row = tuple[tuple[str, str], ...]


def overrides_of(row: Row, pair: tuple[Path, Path], folders: dict[str, Path]) -> list[str]:
    """Choose all of a row's options, on the tiny target with weights for the drafter unless the row has a target."""
    chosen = [f"{group}={option}" for group, option in row] + [word for entry in row for word in NEEDS.get(entry, [])]
    named = dict(row)
    if "target" not in named:
        drafter = named.get("drafter", "eagle3")
        weights = [f"drafter.path={folders[drafter]}"] if drafter in folders else []
        chosen += ["target=hf", f"target.path={pair[0]}", *weights]
    return list({word.partition("=")[0]: word for word in (*CHEAP, *chosen)}.values())


@pytest.mark.parametrize(("group", "option"), SHAPES)
def test_a_shape_composes(group: str, option: str) -> None:
    parts = ["target.weights=random", "drafter=eagle3", "drafter.weights=random", "workload=random_ids"]
    run_ = compose([f"{group}={option}", *parts])
    config, choices = run_.config, run_.choices
    assert list(problems(config)) == []
    assert choices[group].split("+")[0] == option


def row_name(row: Row) -> str:
    return "-".join(option for _, option in row)


@pytest.mark.parametrize("row", RUN_ROWS, ids=row_name)
def test_every_option_builds_and_runs(
    row: Row,
    pair: tuple[Path, Path],
    drafter_folders: dict[str, Path],
    empty_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in_gym.install(monkeypatch)
    (empty_folder / "question.jsonl").write_text(QUESTIONS)
    run_ = compose(overrides_of(row, pair, drafter_folders))
    config, choices = run_.config, run_.choices
    assert list(problems(config)) == []

    run = record_run(config, choices, empty_folder / "run")

    for group, option in row:
        if group == "references":
            assert set(run.references) <= set(option.strip("[]").split(","))
            continue
        assert choices[group].split("+")[0] == option
    num_turns = 2 if ("workload", "spec_bench") in row else 1
    assert (run.status, run["num_requests"]) == ("finished", 2 * num_turns)
    assert run.num_draft_tokens == config.drafter.num_draft_tokens
    assert run["output_tokens"] > 2
    assert not run["divergence.bugs"]


@pytest.mark.parametrize("row", EXAMINED_ROWS, ids=row_name)
def test_the_doctor_examines_every_option(
    row: Row,
    pair: tuple[Path, Path],
    drafter_folders: dict[str, Path],
    empty_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Random weights draft badly, which is a fault (1); what must not happen is a refusal or an error of ours."""
    length = ["max_new_tokens=16"] if row[0][0] == "drafter" else []  # enough rounds to read its weights otherwise
    assert examine([*overrides_of(row, pair, drafter_folders), *SHORT_PROMPTS, *length]) in (0, 1)
    assert "output against plain decoding" in capsys.readouterr().out


def test_every_option_of_the_lab_is_walked() -> None:
    """What is registered and what can be typed are the same. Checkers: tests/test_checker.py; engines:
    tests/test_engines.py."""
    for group in (*(group for group in GROUPS if group != "engine"), "prune.prefill", "prune.catchup"):
        walked = {option for row in [*RUN_ROWS, *EXAMINED_ROWS] for named, option in row if named == group}
        elsewhere = {"auto"} if group != "target" else {"shipped", "packaged", "hf", "shape"}
        elsewhere |= {*ASKED_ELSEWHERE, "sampled"}  # the rules that need it choose it
        own = {name for name, option in options(group).items() if option.__module__.startswith("spec_lab.")}
        assert own - elsewhere <= walked, group
