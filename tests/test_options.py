"""Every option of every group, as the command line composes it, through dry run, run and doctor, on a tiny pair."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import spec_lab
from spec_lab.checkpoints.families.table import read_model_config
from spec_lab.checkpoints.packaged import PACKAGED
from spec_lab.core.errors import UserError
from spec_lab.doctor.__main__ import main as examine
from spec_lab.measure.runner import run
from spec_lab.menu import registry
from spec_lab.menu.chosen import choose
from spec_lab.menu.option import CatchupPruningOption, CheckerOption, DrafterOption, PromptPruningOption
from spec_lab.menu.refusals.run import refusals
from spec_lab.options.shipped import SHIPPED
from spec_lab.program.compose import compose_run
from spec_lab.program.dry_run import describe
from spec_lab.program.options import read_groups, read_option
from spec_lab.workloads.prompt_files import PROMPTS_FOLDER
from tests import stand_in_gym
from tests.covering import each_value
from tests.tiny_assistant import make_tiny_assistant
from tests.tiny_blocks import TINY_PRESETS, make_tiny_p_eagle, write_block
from tests.tiny_mtp import make_tiny_mtp
from tests.tiny_runs import make_runnable_pair

GROUPS_WITHOUT_PARTS = ("experiment", "size", "debug")
OPTIONS = [
    (group.name, option)
    for group in read_groups().values()
    if group.name not in GROUPS_WITHOUT_PARTS
    for option in group.options
]
SHAPES = [
    (group, option) for group, option in OPTIONS if group == "target" and option not in (*SHIPPED, *PACKAGED, "hf")
]
"""Targets of billions of parameters, too large to build here: they go through the dry run alone."""

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


OWN_TURNS = ("user_turns", "outputs")
"""Workloads of tests/test_own_turns.py."""


def options_of(group: str, *left_out: str) -> list[tuple[str, str]]:
    """Options of a group that a run here can have: `auto` is one of the others, packages have tests of their own."""
    return [entry for entry in OPTIONS if entry[0] == group and entry[1] not in ("auto", *PACKAGED, *left_out)]


REFERENCES = [("references", names) for names in ("[plain,unpruned]", "[]", "[plain]", "[unpruned]")]
BESIDE_RULES = (
    *("hybrid", "mtp_eagle", "draft_model", "mtp_vanilla", "frozen_kv", "eagle3", "dflash", "p_eagle", "random"),
    *("ngram", "suffix"),
)
"""Drafters, each beside one of the rules in their order; the others have rows of their own."""
RULE_ROWS = each_value(
    *map(options_of, ("acceptance", "graph", "prune")),
    options_of("workload", *OWN_TURNS),
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
    (("target", name), ("drafter", SHIPPED[name][0])) for _, name in options_of("target", "hf") if name in SHIPPED
]
RUN_ROWS = [
    *RULE_ROWS,
    *DRAFTER_ROWS,
    *TREE_ROWS,
    *TARGET_ROWS,
]
PRUNING = (
    [("prune.prefill", name) for name in registry.load().options(PromptPruningOption)],
    [("prune.catchup", name) for name in registry.load().options(CatchupPruningOption)],
)
ON_HOST = [name for name, row in registry.load().options(DrafterOption).items() if row.drafts_on_host]
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
    config, choices = compose_run([f"{group}={option}", *parts])
    assert refusals(config) == []
    assert f"{group:12}{choices[group]}" in describe(config, choices, [])
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
    config, choices = compose_run(overrides_of(row, pair, drafter_folders))
    assert refusals(config) == []
    described = describe(config, choices, [])

    summary = run(choose(config), choices, empty_folder / "run")

    for group, option in row:
        if group == "references":
            assert set(summary["references"]) <= set(option.strip("[]").split(","))
            continue
        assert f"{group:12}{option:16}".rstrip() in described
        assert choices[group].split("+")[0] == option
    num_turns = 2 if ("workload", "spec_bench") in row else 1
    assert (summary["status"], summary["num_requests"]) == ("finished", 2 * num_turns)
    assert summary["num_draft_tokens"] == config.drafter.num_draft_tokens
    assert summary["output_tokens"] > 2
    assert summary["divergence"] is None or summary["divergence"]["bugs"] == 0


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


def test_every_row_is_an_option_that_is_walked() -> None:
    """What is registered and what can be typed are the same, so that the tests above see every row.

    A checker reads text and no model: tests/test_checker.py has them all.
    """
    for kind, knob in registry.KNOBS.items():
        if kind is CheckerOption:
            continue
        walked = {option for row in [*RUN_ROWS, *EXAMINED_ROWS] for group, option in row if group == knob}
        elsewhere = {option for group, option in SHAPES if group == knob} | {
            "hf",
            *OWN_TURNS,
            *PACKAGED,
        }  # hf: most rows
        assert set(registry.load().options(kind)) - elsewhere <= walked, knob


def test_a_draft_option_that_breaks_losslessness_runs_when_allowed_and_is_recorded(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    lossy = ["acceptance=rejection", "sampling=sampled", "acceptance.allow_lossy=true"]
    target = ["target=hf", f"target.path={pair[0]}", f"drafter.path={pair[1]}"]
    config, choices = compose_run([*lossy, *target, *CHEAP])
    assert refusals(config) == []
    assert run(choose(config), choices, tmp_path / "run")["acceptance_lossless"] is False


HEADING = b"# python -m spec_lab drafter=mine\n# an option of somebody else\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe", "cannot be read"),
        (b"a: [", "cannot be read"),
        (b"a: " + b"[" * 1000, "cannot be read"),
        (b"a: 2020-13-45", "cannot be read"),
        (b"a: !!timestamp x", "cannot be read"),
        (b"a: !!bool x", "cannot be read"),
        (b"- a", "must have keys"),
        (b"5", "must have keys"),
        (b"false", "must have keys"),
        (b"1: 2", "must have keys"),
        (b"defaults: 5", "defaults must be a list"),
        (b"defaults: x", "defaults must be a list"),
        (b"defaults: [/schema/drafter/nope]", "names the schema drafter/nope"),
    ],
)
def test_a_file_that_is_no_option_is_named_in_a_line(content: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(HEADING + content)
    with pytest.raises(UserError, match=said) as caught:
        read_option(file, {})
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_the_configuration_is_that_of_the_package_that_runs(tmp_path: Path) -> None:
    """Not of another install, which Python may find under the name spec_lab.conf; without its own it is refused."""
    package = Path(spec_lab.__file__).parent
    code = "from spec_lab.program.options import conf_folder; print(conf_folder())"
    (tmp_path / "spec_lab").mkdir()
    for entry in package.iterdir():
        if entry.name != "program":
            (tmp_path / "spec_lab" / entry.name).symlink_to(entry)
    shutil.copytree(package / "program", tmp_path / "spec_lab" / "program")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}

    def asked() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)

    assert "UserError" in asked().stderr
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").touch()
    assert asked().stdout.strip() == str(tmp_path / "conf")
