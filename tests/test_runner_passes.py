"""The order in which the runner warms up, times and profiles, and what its references add to the record."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spec_lab.config.run import Run, SamplingConfig
from spec_lab.core.results import GenerationResult
from spec_lab.core.types import Request
from spec_lab.engine.engine import Engine
from spec_lab.measure import runner
from spec_lab.measure.lab import MAIN, LoadedRun, load_lab
from spec_lab.measure.world import World
from spec_lab.options.acceptance.lossless import Rejection
from spec_lab.record import models
from spec_lab.record.reading import read_requests
from spec_lab.record.trace import STAGE_PREFIX, TRACE_FILE
from spec_lab.study.run_table import format_run
from tests.fake_runs import CHOICES
from tests.tiny_runs import make_run_config, write_prompts

PROMPTS = [
    {"id": f"r{index}", "prompt": "round-trip"[: 2 + index] * (1 + 2 * index), "form": "continue"} for index in range(4)
]
IDS = [prompt["id"] for prompt in PROMPTS]
Execute = Callable[..., models.Run]


@pytest.fixture
def configure(pair: tuple[Path, Path], tmp_path: Path) -> Callable[..., Run]:
    prompts = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)
    return lambda drafter="eagle3", **changes: make_run_config(pair, prompts, drafter, **({"batch_size": 2} | changes))


@pytest.fixture
def execute(configure: Callable[..., Run], tmp_path: Path) -> Execute:
    """Run a drafter and record into `tmp_path / "run"`."""
    return lambda *args, **changes: runner.record_run(configure(*args, **changes), CHOICES, tmp_path / "run")


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Note engine and request ids of every generation of a run, in order."""
    labs: list[LoadedRun] = []
    seen: list[tuple[str, list[str]]] = []
    generate = Engine.generate

    def load(chosen: Run, world: World, last: Any = None) -> LoadedRun:
        labs.append(load_lab(chosen, world, last))
        return labs[-1]

    def watched(engine: Engine, requests: list[Request], *args: Any, **options: Any) -> GenerationResult:
        [name] = [name for name, known in labs[-1].engines.items() if known is engine] or ["another"]
        seen.append((name, [request.request_id for request in requests]))
        return generate(engine, requests, *args, **options)

    monkeypatch.setattr(runner, "load_lab", load)
    monkeypatch.setattr(Engine, "generate", watched)
    return seen


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def num_stages(folder: Path) -> Counter[str]:
    """How often each stage occurs in the trace of a profiled stretch."""
    with gzip.open(folder / TRACE_FILE, "rt") as file:
        events = json.load(file)["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    return Counter(name.removeprefix(STAGE_PREFIX) for name in names if name.startswith(STAGE_PREFIX))


def attention_calls(summary: models.Run) -> float:
    """How many attention calls a profiled round has: one a layer of the target, and one a draft step."""
    [calls] = [k.calls_per_round for k in summary.kernels if k.name == "aten::scaled_dot_product_attention"]
    return calls


def test_passes_are_warmed_up_and_take_turns(execute: Execute, passes: list[tuple[str, list[str]]]) -> None:
    """Each repeat starts one engine later, so that a machine that slows down does not always hurt the same one.

    What is warmed up fills a round, here of two requests.
    """
    execute(prune="catchup", repeats=3, warmup_requests=1, profile_rounds=1, max_new_tokens=6)
    warm_up = [(name, IDS[:2]) for name in (MAIN, "plain", "unpruned")]
    order = [MAIN, "plain", "unpruned", "plain", "unpruned", MAIN, "unpruned", MAIN, "plain"]
    profiled_and_counted = [(MAIN, IDS[:2])] * 2
    assert passes == [*warm_up, *((name, IDS) for name in order), *profiled_and_counted]


@pytest.mark.parametrize(
    ("drafter", "changes", "references"),
    [
        ("eagle3", {"prune": "prefill"}, {"plain", "unpruned"}),
        ("eagle3", {"prune": "none"}, {"plain"}),
        ("eagle3", {"prune": "catchup", "references": ["unpruned"]}, {"unpruned"}),
        ("eagle3", {"prune": "catchup", "references": []}, set()),
        ("eagle3", {"prune": "none", "references": [], "fixed_k": [1, 2]}, {"k1", "k2"}),
        ("none", {"prune": "none"}, set()),
    ],
)
def test_references_are_those_that_differ_from_the_run(
    drafter: str, changes: dict[str, Any], references: set[str], configure: Callable[..., Run]
) -> None:
    lab = load_lab(configure(drafter, **changes))
    assert set(lab.engines) == {MAIN} | references
    for name in references & {"k1", "k2"}:
        assert lab.engines[name].rounds.most.num_made == int(name[1:])


def test_a_repeated_run_with_references_records_all_of_it(execute: Execute, tmp_path: Path) -> None:
    summary = execute(prune="catchup", repeats=2, warmup_requests=1)
    plain, unpruned = summary.references["plain"], summary.references["unpruned"]
    assert [len(speed.repeats) for speed in (summary, plain, unpruned)] == [2, 2, 2]
    assert [speed["repeats_identical"] for speed in (summary, plain, unpruned)] == [True, True, True]
    for name in ("speedup", "pruning_speedup"):
        assert 0 < summary[f"{name}.low"] <= summary[name] <= summary[f"{name}.high"]
    assert summary["break_even_acceptance_length"] is not None
    assert summary["acceptance_length"] == unpruned["acceptance_length"]
    assert plain["acceptance_length"] is None
    for name in ("rows.catchup_attention", "rows.catchup_output", "rows.catchup_mlp"):
        assert summary[name] == summary["rows.catchup_live"] > 0
        assert unpruned[name] == 4 * unpruned["rows.catchup_live"]
    assert summary["divergence.diverged"] == 0
    assert [row.id for row in read_requests(tmp_path / "run")] == IDS
    rounds = read_rounds(tmp_path / "run")
    assert [row["index"] for row in rounds] == 2 * list(range(summary["verify_calls"]))
    assert [row["repeat"] for row in rounds] == sorted(row["repeat"] for row in rounds)


def test_a_run_that_fails_later_keeps_its_first_repeat(
    execute: Execute, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    generate, turns = Engine.generate, iter((MAIN, "plain"))

    def failing(*args: Any, **options: Any) -> GenerationResult:
        if next(turns, None) is None:
            raise KeyboardInterrupt
        return generate(*args, **options)

    monkeypatch.setattr(Engine, "generate", failing)
    with pytest.raises(KeyboardInterrupt):
        execute(repeats=2, references=["plain"])
    assert all(row.text for row in read_requests(tmp_path / "run"))
    assert {row["repeat"] for row in read_rounds(tmp_path / "run")} == {0}


@pytest.mark.parametrize(
    ("references", "max_new_tokens"),
    [
        pytest.param([], 11, id="last round cut"),
        pytest.param(["unpruned"], 13, id="unpruned, whole rounds"),
        pytest.param(["plain", "unpruned"], 11, id="plain and unpruned, last round cut"),
    ],
)
def test_an_oracle_learns_before_the_clock_starts(
    references: list[str], max_new_tokens: int, execute: Execute, passes: list[tuple[str, list[str]]]
) -> None:
    """Every draft is right, behind the limit too, for the oracle of the unpruned reference as well."""
    summary = execute(
        "oracle", references=references, prune="catchup", max_new_tokens=max_new_tokens, num_draft_tokens=3
    )
    learning = ("another", IDS)
    assert passes[0] == learning
    assert passes.count(learning) == 1
    assert set(summary.references) == set(references)
    if "unpruned" in references:
        assert summary.references["unpruned"]["acceptance_length"] == 4.0
    assert (summary["acceptance_length"], summary["rounds"]) == (4.0, 3 * len(IDS))
    assert summary["divergence.diverged"] == 0


def test_plain_decoding_is_a_run_too(execute: Execute, tmp_path: Path) -> None:
    summary = execute("none", profile_rounds=2, repeats=2)
    assert (summary.num_draft_tokens, summary["acceptance_length"], summary["speedup"]) == (0, None, None)
    assert summary["emitted_tokens"] == summary["rounds"] > 0
    assert summary["output_tokens"] == summary["emitted_tokens"] + len(IDS)
    assert summary["divergence.bugs"] == 0
    assert summary["stage_ms_per_round.catchup"] is summary["stage_ms_per_round.recur"] is None
    assert num_stages(tmp_path / "run")["verify"] == 2
    assert summary.verdict.startswith("Plain decoding gave")


def test_a_sampled_run_has_nothing_to_diverge_from(configure: Callable[..., Run], tmp_path: Path) -> None:
    config = configure("ngram", repeats=2)
    config.acceptance, config.sampling = Rejection(method="one_hot"), SamplingConfig(temperature=1.0)
    summary = runner.record_run(config, CHOICES, tmp_path / "run")
    assert summary["divergence"] is None
    assert summary["repeats_identical"] is True
    assert summary["speedup"] is not None
    assert format_run(summary).startswith("Speed")


def test_a_profiled_stretch_has_kernels_and_keeps_its_trace(execute: Execute, tmp_path: Path) -> None:
    summary = execute(profile_rounds=3)
    stages = num_stages(tmp_path / "run")
    assert [stages[name] for name in ("verify", "accept", "catchup", "recur")] == [3] * 4
    assert stages["commit"] > 0
    kernels = summary.kernels
    assert [kernel.us_per_round for kernel in kernels] == sorted((k.us_per_round for k in kernels), reverse=True)
    assert all(kernel.calls_per_round > 0 and kernel.us_per_round > 0 for kernel in kernels)
    assert not [kernel for kernel in kernels if kernel.name.startswith(STAGE_PREFIX)]
    assert attention_calls(summary) == 4 + 3


def test_profiling_ends_where_the_requests_do(execute: Execute, tmp_path: Path) -> None:
    """Requests of 6 tokens are over before 100 rounds are; what there was is averaged over what there was."""
    summary = execute(profile_rounds=100, max_new_tokens=6)
    assert 0 < num_stages(tmp_path / "run")["verify"] < 6
    assert attention_calls(summary) == 4 + 3


def test_prompts_in_chunks_do_not_count_as_rounds(execute: Execute) -> None:
    """The last of a batch's prompts is still being read, chunk by chunk, while the first is already decoded."""
    summary = execute(batch_size=4, profile_rounds=2, max_new_tokens=24, cache={"prefill_chunk": 4})
    assert summary["divergence.bugs"] == 0
    assert attention_calls(summary) == 4 + 3
