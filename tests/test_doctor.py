"""The doctor's command line, and checks that need no trained head."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_lab.app.compose import compose
from spec_lab.doctor.__main__ import main
from spec_lab.doctor.checkpoints import check_dtype, check_tokenizer, check_vocabulary
from spec_lab.doctor.evidence import Evidence
from spec_lab.doctor.examine import examine
from spec_lab.doctor.findings import Verdict, summarize
from spec_lab.doctor.loop import check_teacher_forcing, disagreement
from spec_lab.doctor.readings import gain_of
from spec_lab.doctor.subject import load_subject, strict_greedy
from spec_lab.doctor.teacher_forced import Drafted
from tests.tiny_runs import make_run_config, make_runnable_pair, write_prompts

TEXTS = [{"prompt": "abcdefgh"[index:] + "xyz" * index} for index in range(4)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_runnable_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", TEXTS)


def test_a_random_head_disagrees_everywhere_and_nothing_else_is_wrong(
    pair: tuple[Path, Path], prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No other reading helps it, and its loop is as good as teacher forcing: draft for draft, over captured rounds."""
    arguments = ["target=hf", f"target.path={pair[0]}", f"drafter.path={pair[1]}", "workload=jsonl", "graph=full_loop"]
    changes = ["max_new_tokens=16", "batch_size=2", "prune=catchup", "device=cpu", "num_threads=1"]
    assert main([*arguments, f"workload.path={prompts}", *changes]) == 1
    lines = capsys.readouterr().out.splitlines()
    verdicts = dict(re.split("  +", line)[:2] for line in lines[:-2])
    assert [check for check, verdict in verdicts.items() if verdict == "fault"] == ["teacher forcing"]
    assert verdicts["loop against teacher forcing"] == "ok"
    assert lines[-1].startswith("most likely fault: teacher forcing: ")


def test_a_drafter_without_weights_has_bounds_alone(pair: tuple[Path, Path], prompts: Path) -> None:
    config = make_run_config(pair, prompts, "oracle", max_new_tokens=12)
    findings = examine(load_subject(config))
    states, *bounds = findings[:4]
    assert [finding.verdict for finding in bounds] == [Verdict.OK] * 3
    assert {finding.verdict for finding in (states, *findings[4:])} == {Verdict.DOES_NOT_APPLY}
    assert summarize(findings) == f"no fault found; checks that do not apply: {len(findings) - 3}"


def test_the_run_is_examined_under_strict_greedy_acceptance(pair: tuple[Path, Path], prompts: Path) -> None:
    config = make_run_config(pair, prompts, options={"draft_sampling": "distribution"})
    config.sampling.temperature = 0.8
    config.acceptance.name = "rejection"
    greedy = strict_greedy(config)
    assert (greedy.acceptance.name, greedy.sampling.temperature) == ("strict", 0.0)
    assert getattr(greedy.drafter, "draft_sampling") == "greedy"  # noqa: B009


def test_a_tokenizer_of_another_model(pair: tuple[Path, Path], prompts: Path, tmp_path: Path) -> None:
    target, head = (Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in pair)
    subject = load_subject(make_run_config((target, head), prompts, max_new_tokens=4))
    assert check_tokenizer(subject).verdict is Verdict.OK
    shutil.copy(target / "tokenizer.json", head)
    assert "160 of them have the same id" in check_tokenizer(subject).measured
    change_ids(head / "tokenizer.json", {"A": 5, "&": 32})
    fault = check_tokenizer(subject)
    assert "158 of them have the same id" in fault.measured
    assert fault.cause is not None and "another tokenizer" in fault.cause
    change_ids(target / "tokenizer.json", {"A": 500})
    fault = check_tokenizer(subject)
    assert fault.cause is not None and "1 token ids are outside" in fault.cause


def change_ids(file: Path, ids: dict[str, int]) -> None:
    tokenizer = json.loads(file.read_text())
    assert tokenizer["model"]["vocab"].keys() >= ids.keys()
    tokenizer["model"]["vocab"] |= ids
    file.write_text(json.dumps(tokenizer))


def test_weights_that_do_not_survive_the_runs_dtype(pair: tuple[Path, Path], prompts: Path, tmp_path: Path) -> None:
    head = Path(shutil.copytree(pair[1], tmp_path / "head"))
    subject = load_subject(make_run_config((pair[0], head), prompts, max_new_tokens=4))
    half, brain = (replace(subject, models=replace(subject.models, dtype=t)) for t in (torch.float16, torch.bfloat16))
    assert check_dtype(half).verdict is check_dtype(brain).verdict is Verdict.OK
    tensors = load_file(head / "model.safetensors")
    save_file(tensors | {"norm.weight": tensors["norm.weight"] * 1e-8}, head / "model.safetensors")
    assert check_dtype(subject).verdict is check_dtype(brain).verdict is Verdict.OK
    fault = check_dtype(half)
    assert fault.cause is not None and fault.cause.startswith("norm.weight does not survive")


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_a_shift_shows_in_the_words_that_can_be_drafted(
    pair: tuple[Path, Path], prompts: Path, tmp_path: Path, shift: int
) -> None:
    """A target that wrote every third id, and a map of these."""
    head = Path(shutil.copytree(pair[1], tmp_path / "head"))
    subject = load_subject(make_run_config((pair[0], head), prompts, max_new_tokens=4))
    words = list(range(1, 160, 3))
    subject = replace(subject, plain=[replace(record, output_ids=words) for record in subject.plain])
    d2t = torch.tensor(words) + shift - torch.arange(len(words))
    save_file(load_file(head / "model.safetensors") | {"d2t": d2t}, head / "model.safetensors")
    finding = check_vocabulary(subject)
    assert finding.verdict is (Verdict.FAULT if shift else Verdict.OK)
    assert not shift or (finding.cause is not None and f"shifted by {shift:+d}" in finding.cause)


def test_a_later_draft_is_judged_after_right_ones_alone() -> None:
    drafted = Drafted(torch.zeros(10, 3), torch.tensor([0, 0, 1, 1, 1, 1, 2, 2, 2, 3]))
    assert [drafted.num_judged(position) for position in (1, 2, 3)] == [10, 8, 4]
    assert [drafted.conditional(position) for position in (1, 2, 3)] == [0.8, 0.5, 0.25]
    assert Drafted(torch.zeros(4, 3), torch.zeros(4)).conditional(3) == 0.0


@pytest.mark.parametrize(
    ("lengths", "position"),
    [
        ([0] * 80 + [1] * 6 + [3] * 4, "drafts disagree"),
        ([0] * 24 + [3] * 6, None),  # 20 % of 30 rounds may be 25 %
        ([0] * 30 + [1] * 33 + [2] * 3, "draft 2 is right in 8%"),
        ([0] * 30 + [1] * 19 + [2] * 6, None),  # 24 % of 25 rounds may be 30 %
        ([0] * 30 + [2] * 30, "draft 3 is right in 0%"),
        ([0] * 30 + [1] * 10 + [2] * 20, None),  # 20 rounds do not tell of draft 3
        ([0] * 30 + [1] * 10 + [2] * 6 + [3] * 20, None),
    ],
)
def test_the_first_position_that_collapses_is_named(lengths: list[int], position: str | None) -> None:
    verdict, cause = disagreement(Drafted(torch.zeros(len(lengths), 3), torch.tensor(lengths)))
    assert (verdict is not Verdict.FAULT) == (position is None)
    assert position is None or (cause is not None and cause.startswith(position))


@pytest.mark.parametrize(
    ("num_right", "num_rounds", "verdict"), [(2, 40, "fault"), (8, 40, "suspicious"), (30, 200, "fault")]
)
def test_few_rounds_of_few_right_drafts_are_worth_a_look(num_right: int, num_rounds: int, verdict: str) -> None:
    drafted = Drafted(torch.zeros(num_rounds, 3), torch.tensor([1] * num_right + [0] * (num_rounds - num_right)))
    evidence = SimpleNamespace(as_configured=drafted, rounds=range(num_rounds))
    assert check_teacher_forcing(cast(Evidence, evidence)).verdict == verdict


def test_a_gain_is_paired_over_the_rounds() -> None:
    drafted = torch.tensor
    base = drafted([0, 1, 2, 3] * 10)
    assert not gain_of(base, base).is_clear
    assert gain_of(base, drafted([1, 2, 3, 3] * 10)).is_clear
    assert not gain_of(base, drafted([3, 1, 2, 0] * 10)).is_clear
    assert not gain_of(base, drafted([1, *[0, 1, 2, 3] * 9, 1, 2, 3])).is_clear


@pytest.mark.parametrize(
    "override",
    [
        "drafter.plan=cost",
        "graph.rounds_per_replay=4",
    ],
)
def test_a_run_is_examined_with_all_its_drafts_and_a_look_after_each_round(override: str) -> None:
    config = compose(["drafter=eagle3", "graph=round", override]).config
    chosen = strict_greedy(config)
    assert chosen.drafter.num_draft_tokens == 3 and chosen.fewer_drafts is None
    graph: Any = chosen.graph
    assert graph.rounds_per_replay == 1
