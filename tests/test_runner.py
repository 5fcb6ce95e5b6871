"""A whole run on a tiny pair: what the runner measures, checks and records besides the clock."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from spec_lab.config.groups import AcceptanceConfig, GraphConfig
from spec_lab.config.run import RecordConfig, Run
from spec_lab.measure.lab import load_lab
from spec_lab.measure.runner import record_run
from spec_lab.measure.world import ALONE
from spec_lab.options.acceptance.imposed import Synthetic
from spec_lab.options.acceptance.lossless import Strict
from spec_lab.options.acceptance.lossy import RelaxedThinking
from spec_lab.options.graphs import FullLoop, RoundGraph
from spec_lab.record import models
from spec_lab.record.reading import read_requests
from spec_lab.record.verify_rows import load_verify_rows
from spec_lab.study.rescore import rescore
from spec_lab.study.run_table import format_run
from spec_lab.workloads.pocket_form import THINK_START
from tests.fake_runs import CHOICES
from tests.lab import part
from tests.tiny_runs import make_run_config, write_prompts, write_tokenizer

Execute = Callable[..., tuple[models.Run, Path]]
LOOSE = RelaxedThinking(topk=128, delta=1.0)
PROMPTS = [
    {"id": "open", "category": "thinking", "prompt": f"{THINK_START}abc", "form": "continue", "answer": "7"},
    {"id": "closed", "category": "plain", "prompt": "abcabc", "form": "continue", "answer": "7"},
    {"id": "free", "category": "plain", "prompt": "cab", "form": "continue"},
]


@pytest.fixture
def execute(pair: tuple[Path, Path], tmp_path: Path) -> Execute:
    """Run a rule over `PROMPTS`; the summary, and the folder of the record."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)

    def execute(acceptance: AcceptanceConfig, topk: int = 0, **changes: Any) -> tuple[models.Run, Path]:
        config = make_run_config(pair, prompts, references=["plain"], batch_size=2, **changes)
        config.acceptance, config.record = acceptance, RecordConfig(topk=topk)
        folder = tmp_path / acceptance.name
        summary = record_run(config, CHOICES | {"acceptance": acceptance.name}, folder)
        return summary, folder

    return execute


@pytest.mark.parametrize("graph", [FullLoop(), RoundGraph()], ids=["full_loop", "round"])
def test_graphs_are_gone_when_the_processes_part(
    graph: GraphConfig, execute: Execute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL waits for ever for a graph that captured one of its collectives."""
    alive: list[weakref.ref[Any]] = []

    @contextmanager
    def world_of(config: Run) -> Iterator[Any]:
        yield ALONE
        gc.collect()
        assert alive and not any(engine() is not None for engine in alive)

    def load(*args: Any) -> Any:
        lab = load_lab(*args)
        alive.extend(weakref.ref(engine) for engine in lab.engines.values())
        return lab

    monkeypatch.setattr("spec_lab.measure.runner.world_of", world_of)
    monkeypatch.setattr("spec_lab.measure.runner.load_lab", load)
    execute(Strict(), graph=graph)


def test_a_lossy_run_says_what_it_cost(execute: Execute) -> None:
    summary, folder = execute(LOOSE)
    rows = {row.id: row for row in read_requests(folder)}
    assert summary.acceptance_lossless is False
    assert summary["relaxed.hits"] > 5
    assert summary["relaxed.per_1000_tokens"] == 1000 * summary["relaxed.hits"] / summary["emitted_tokens"]
    parts = summary.by_category
    assert (parts["plain"]["relaxed.hits"], parts["plain"]["relaxed.per_1000_tokens"]) == (0, 0.0)
    assert parts["thinking"]["relaxed.hits"] == summary["relaxed.hits"]
    in_thinking = 1000 * summary["relaxed.hits"] / parts["thinking"]["emitted_tokens"]
    assert parts["thinking"]["relaxed.per_1000_tokens"] == in_thinking
    assert (rows["open"].thinking_spans, rows["closed"].thinking_spans) == ([(0, 12)], [])
    assert summary.under("thinking") == {"mean_tokens": 4.0, "share": 12 / summary["output_tokens"]}
    assert (parts["thinking"]["thinking.mean_tokens"], parts["thinking"]["thinking.share"]) == (12.0, 1.0)
    assert summary["acceptance_length_by.phase.thinking"] > summary["acceptance_length_by.phase.answer"]
    divergence = rows["open"].divergence
    assert divergence is not None and divergence.kind == "lossy"
    assert (parts["thinking"]["equal_to_plain"], parts["plain"]["equal_to_plain"]) == (0.0, 1.0)
    assert summary["equal_to_plain"] == pytest.approx(2 / 3)
    assert (summary["divergence.lossy"], summary["divergence.bugs"]) == (1, 0)
    assert summary["divergence.median_index"] == divergence.index
    assert summary["divergence.median_margin"] == divergence.margin
    change = summary.under("accuracy_change")
    assert (change["n"], change["lost"], change["gained"]) == (2, 0, 0)
    assert "acceptance=relaxed_thinking is lossy: its outputs are plain decoding's in 66.7%" in summary.verdict


def test_rounds_carry_their_relaxed_hits(execute: Execute) -> None:
    summary, folder = execute(LOOSE)
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert all(len(line["relaxed"]) == len(line["request_ids"]) for line in lines)
    assert sum(sum(line["relaxed"]) for line in lines) == summary["relaxed.hits"]
    rows = read_requests(folder)
    kept = sum((row.token_origins or "").count("r") for row in rows)
    assert 0 < kept <= summary["relaxed.hits"], "a limit may cut the last ones"
    for row in rows:
        origins, ends = row.token_origins, row.text_ends
        assert origins is not None and len(origins) == len(row.output_ids)
        assert ends is not None and ends[-1] == len(row.text)


def test_a_lossless_run_counts_thinking_too(execute: Execute) -> None:
    summary, folder = execute(Strict())
    assert summary.acceptance_lossless is True
    assert summary["relaxed"] is None
    assert summary["thinking.mean_tokens"] == 4.0
    assert summary.references["plain"].under("thinking") == summary.under("thinking")
    assert summary["equal_to_plain"] == 1.0
    assert "lossy" not in summary.verdict
    assert json.loads((folder / "rounds.jsonl").read_text().splitlines()[0])["relaxed"] is None


def test_imposed_acceptance_has_no_accuracy_and_says_so(execute: Execute) -> None:
    summary, _ = execute(Synthetic(mean_length=2.5))
    assert (summary.acceptance_imposed, summary.acceptance_lossless) == (True, False)
    assert (summary["accuracy"], summary["accuracy.n"], summary["accuracy_change"]) == (None, 0, None)
    assert "that was imposed" in summary.verdict
    assert "imposed, not measured" in (text := format_run(summary)) and text.count("*") > 2


@pytest.mark.parametrize("rule", [LOOSE, part("acceptance", "strict")], ids=["relaxed", "strict"])
def test_kept_rows_give_the_acceptance_that_was_timed(rule: AcceptanceConfig, execute: Execute) -> None:
    summary, folder = execute(rule, topk=128)
    accepted = {row.id: row.accepted_per_round for row in read_requests(folder)}
    assert rescore(folder, rule) == accepted
    assert len(load_verify_rows(folder).accepted) == summary["rounds"]


def test_a_tokenizer_without_markers_has_no_thinking(pair: tuple[Path, Path], execute: Execute) -> None:
    write_tokenizer(pair[0], ())
    try:
        summary, folder = execute(part("acceptance", "strict"))
        with pytest.raises(ValueError, match=r"target\.thinking_begin"):
            execute(LOOSE)
    finally:
        write_tokenizer(pair[0])
    assert summary["thinking"] is None
    assert {row.thinking_spans for row in read_requests(folder)} == {None}


def test_what_an_earlier_job_left_is_gone_before_the_next_loads(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engine and graphs of a job are a cycle, whose caches fill half a GPU until somebody collects it."""

    class Left:
        def __init__(self) -> None:
            self.itself = self

    class Loads(Exception):
        pass

    def opened(*_: object) -> None:
        assert left() is None
        raise Loads

    config = make_run_config(pair, write_prompts(tmp_path / "prompts.jsonl", PROMPTS))
    gc.disable()
    try:
        left = weakref.ref(Left())
        monkeypatch.setattr("spec_lab.measure.lab.open_workload", opened)
        with pytest.raises(Loads):
            load_lab(config)
    finally:
        gc.enable()


ANSWERED = [
    {"id": "any", "prompt": "abcabc", "form": "continue", "answer": "7", "checker": "exact"},
    {"id": "none", "prompt": "cab", "form": "continue", "answer": "7"},
]


def test_what_a_checker_read_stands_beside_each_answer(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt names its checker, or the workload does; all outputs are cut here, and the total says so too."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", ANSWERED)
    config = make_run_config(pair, prompts, references=["plain"])
    config.workload.checker = "boxed"
    summary = record_run(config, dict(CHOICES), tmp_path / "run")
    rows = {row.id: row for row in read_requests(tmp_path / "run")}
    assert [rows[name].checker for name in ("any", "none")] == ["exact", "boxed"]
    read = rows["any"].answer_read
    assert read and read in rows["any"].text and rows["none"].answer_read is None
    assert [rows[name].correct for name in rows] == [False, False]
    ended = [row for row in rows.values() if row.finish_reason == "eos"]
    assert summary["accuracy.n"] == 2 and summary["accuracy.cut"] == 2 - len(ended)
    assert ("found no answer in" in capsys.readouterr().err) == any(row.id == "none" for row in ended)
