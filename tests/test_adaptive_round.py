"""Rounds whose requests offer fewer drafts: by confidence, batch size or a budget; eagerly and in every graph mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from spec_lab.acceptance import rejection, relaxed, strict
from spec_lab.config.run import VerifyConfig
from spec_lab.core.results import GenerationResult
from spec_lab.core.types import Request
from spec_lab.engine.engine import Engine
from spec_lab.engine.graphs.captured import CapturedMode
from spec_lab.engine.k_schedule import KSchedule, problem_of
from spec_lab.engine.offers import AllOffered, Counted
from spec_lab.measure.launch_counts import CountedRounds
from spec_lab.measure.watched_rounds import watch_rounds
from tests.covering import each_value
from tests.graph_lab import DRAFTERS, MODES, RULES, Lab, generate_watched, lab, mixed_requests

__all__ = ["lab"]

THRESHOLDS = {"frozen_kv": 0.5, "draft_model": 0.1}
STOP = {"stop": "confidence", "stop_threshold": 0.012}
SCHEDULE = [[1, 1, 3], [2, 2, 0], [3, 3, 1]]
KINDS: dict[str, dict[str, Any]] = {
    "stop": {"options": STOP},
    "schedule": {"options": {"k_schedule": SCHEDULE}},
    "budget": {"verify": VerifyConfig(budget=4)},
    "all": {"options": STOP | {"k_schedule": SCHEDULE}, "verify": VerifyConfig(budget=5)},
}


def with_threshold(options: dict[str, Any]) -> dict[str, Any]:
    """The same options with a threshold at which some of the drafter's first drafts are offered, and some not."""
    knobs = options.get("options", {})
    threshold = THRESHOLDS.get(options.get("drafter", "eagle3"), 0.15)
    return options | {"options": knobs | {"stop_threshold": threshold} if "stop" in knobs else knobs}


def text_and_offers(result: GenerationResult) -> dict[str, tuple[list[int], list[int], list[int]]]:
    return {r.request_id: (r.output_ids, r.offered_per_round, r.accepted_per_round) for r in result.requests}


def texts(result: GenerationResult) -> dict[str, list[int]]:
    return {record.request_id: record.output_ids for record in result.requests}


def offered_in(result: GenerationResult) -> set[int]:
    return {count for record in result.requests for count in record.offered_per_round}


def confidences_in(result: GenerationResult) -> list[float]:
    """Of all offered drafts in a row, after a check that there is one for each, and none above the one before it."""
    found = []
    for record in sorted(result.requests, key=lambda record: record.request_id):
        for confidences, num_offered in zip(record.confidence_per_round, record.offered_per_round, strict=True):
            assert len(confidences) in (0, num_offered) and confidences == sorted(confidences, reverse=True)
            found += confidences
    return found


@pytest.mark.parametrize(("kind", "mode", "drafter"), each_value(KINDS, MODES, DRAFTERS))
def test_text_is_plain_decodings_and_a_graph_offers_what_eager_offers(
    lab: Lab, kind: str, mode: str, drafter: str
) -> None:
    requests = mixed_requests(5, 10)
    options = with_threshold({"drafter": drafter, "batch_size": 3, "rule": RULES["strict"], **KINDS[kind]})
    captured = lab.engine(requests, MODES[mode], **options).generate(requests)
    eager = lab.engine(requests, None, **options).generate(requests)
    plain = lab.engine(requests, None, "none", batch_size=3).generate(requests)
    assert texts(captured) == texts(plain)
    assert captured.graph.replays > 0
    if mode != "overlap":  # whose batches also hold requests that have ended
        assert text_and_offers(captured) == text_and_offers(eager)
        assert confidences_in(captured) == pytest.approx(confidences_in(eager), abs=1e-5)
    assert bool(confidences_in(eager)) == (kind != "schedule")
    if kind == "stop":
        threshold = options["options"]["stop_threshold"]
        for confidences in (part for record in eager.requests for part in record.confidence_per_round):
            assert all(each >= threshold for each in confidences[:-1])
            assert len(confidences) == 3 or confidences[-1] < threshold
    assert len(offered_in(eager)) > 1 and (kind == "stop") == (0 not in offered_in(eager))


@pytest.mark.parametrize(("kind", "mode"), [("stop", "round"), ("all", "step_replay")])
def test_sampled_drafts_are_offered_and_judged_alike(lab: Lab, kind: str, mode: str) -> None:
    requests = mixed_requests(5, 10)
    options = with_threshold({"batch_size": 3, "rule": RULES["sampled"], **KINDS[kind]})
    captured = lab.engine(requests, MODES[mode], **options).generate(requests)
    eager = lab.engine(requests, None, **options).generate(requests)
    assert text_and_offers(captured) == text_and_offers(eager)
    assert {count for record in eager.requests for count in record.accepted_per_round} != {0}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_drafter_catches_up_through_rounds_without_drafts(lab: Lab, drafter: str) -> None:
    """What stands in its cache at the end is what stands there when every round drafts."""
    requests = [
        replace(request, ignore_eos=True, max_new_tokens=length)
        for request, length in zip(mixed_requests(2, 10), (10, 5), strict=True)
    ]
    options = {"drafter": drafter, "batch_size": 2, "rule": RULES["strict"]}
    schedule = {"options": {"k_schedule": [[1, 1, 3], [2, 2, 0]]}}
    result, watch = generate_watched(lab.engine(requests, None, **options, **schedule), requests)
    expected, full = generate_watched(lab.engine(requests, None, **options), requests)
    assert texts(result) == texts(expected)
    assert offered_in(result) == {0, 3}
    for name, caches in watch.committed.items():
        for path, cache in caches.items():
            other = full.committed[name][path]
            dim = cache.dim() - 4
            num_rows = min(cache.shape[dim], other.shape[dim])  # a last round may have gone on behind the limit
            pair = (part.narrow(dim, 0, num_rows) for part in (cache, other))
            torch.testing.assert_close(*pair, rtol=0, atol=1e-4)


def test_k_follows_the_running_requests(lab: Lab) -> None:
    """The slots keep the width of the largest K; what was drafted for another batch is cut, or has a row left over."""
    requests = [
        replace(request, ignore_eos=True, max_new_tokens=length)
        for request, length in zip(mixed_requests(3, 12), (12, 8, 4), strict=True)
    ]
    options = {"batch_size": 3, "rule": RULES["strict"], "options": {"k_schedule": SCHEDULE}}
    engine = lab.engine(requests, MODES["round"], prune="none", **options)
    assert [engine.rounds.of_batch(count).num_draft_tokens for count in (1, 2, 3)] == [3, 0, 1]
    assert engine.parts.slots.input_ids.shape[1] == 4
    result = engine.generate(requests)
    recorder = cast(CapturedMode, engine.graph).recorder
    assert result.graph.captures == 3 * recorder.num_copies, "a graph a batch size and K"
    for record in result.rounds:
        k = {1: 3, 2: 0, 3: 1}[len(record.request_ids)]
        padded = engine.graph.padded_size(len(record.request_ids))
        assert (record.rows.verified, record.rows.drafted) == (padded * (k + 1), padded * k)
        assert record.rows.offered <= k * len(record.request_ids)
        assert record.rows.catchup_mlp == padded * (k + 1)


def test_eager_rounds_leave_out_rows_and_draft_steps_that_nobody_needs(lab: Lab) -> None:
    requests = mixed_requests(4, 12, seed=1)
    options = {"batch_size": 1, "rule": RULES["strict"], "options": STOP}
    eager = lab.engine(requests, None, **options).generate(requests)
    captured = lab.engine(requests, MODES["round"], **options).generate(requests)
    for record in eager.rounds:
        assert record.rows.verified == record.rows.offered + 1
    assert {record.rows.verified for record in captured.rounds} == {4}
    assert {record.rows.drafted for record in captured.rounds} == {3}
    assert {record.rows.drafted for record in eager.rounds} == {2, 3}
    for record in eager.requests:
        mine = [r.rows for r in eager.rounds if record.request_id in r.request_ids]
        assert [rows.drafted for rows in mine[:-1]] == [rows.offered for rows in mine[1:]]


def test_a_budget_is_kept_to(lab: Lab) -> None:
    requests = [replace(request, ignore_eos=True) for request in mixed_requests(3, 12)]
    options = {"batch_size": 3, "rule": RULES["strict"], "verify": VerifyConfig(budget=6)}
    result = lab.engine(requests, MODES["round"], **options).generate(requests)
    for record in result.rounds:
        count = len(record.request_ids)
        assert record.rows.offered == min(6 - count, 3 * count)


# What nobody asked for costs nothing.


def counted(engine: Engine, requests: list[Request]) -> float:
    work = watch_rounds(engine, requests, 3, CountedRounds).work()
    assert work is not None
    launches = work["launches_per_round"]
    assert launches is not None
    return launches


@pytest.mark.parametrize("rule", ["strict", "relaxed", "sampled"])
def test_rounds_that_offer_all_run_no_operator_for_it(lab: Lab, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as with rules that never heard of offers; one that does offer fewer runs more."""
    requests = mixed_requests(2, 12)
    options = {"batch_size": 2, "rule": RULES[rule]}
    engine = lab.engine(requests, None, **options)
    assert isinstance(engine.round.offers, AllOffered)
    all_offered = counted(engine, requests)
    unmasked: Callable[..., Any] = lambda inputs, passed: passed  # noqa: E731
    for module in (relaxed, rejection):
        monkeypatch.setattr(module, "only_offered", unmasked)
    monkeypatch.setattr(strict, "offered_alone", lambda passed, num_drafts: passed)
    monkeypatch.setattr(rejection, "offered_proposal", lambda method, inputs: method.proposal(inputs))
    assert counted(lab.engine(requests, None, **options), requests) == all_offered
    assert counted(lab.engine(requests, None, **options, options=STOP), requests) > all_offered


def test_only_a_run_that_asks_has_an_adaptive_round(lab: Lab) -> None:
    requests = mixed_requests(2, 4)
    for kind in KINDS.values():
        assert isinstance(lab.engine(requests, None, batch_size=3, **kind).round.offers, Counted)


# The ranges.


@pytest.mark.parametrize(
    ("ranges", "ks"),
    [
        ([[1, 4, 5]], [5, 5, 5, 5, 5, 5]),
        ([[1, 1, 5], [3, 4, 2], [6, 6, 0]], [5, 5, 2, 2, 2, 0]),
    ],
)
def test_gaps_and_larger_batches_have_the_k_before_them(ranges: list[list[int]], ks: list[int]) -> None:
    assert problem_of(ranges, 16) is None
    assert [KSchedule.of(ranges).k_of(count) for count in range(1, 7)] == ks


@pytest.mark.parametrize(
    ("ranges", "problem"),
    [
        ([], "there is no range"),
        ([[1, 2]], "three numbers"),
        ([[2, 4, 1]], "begin at 1"),
        ([[1, 4, 2], [4, 5, 1]], "must begin at 5 or later, since the range before it ends at 4"),
        ([[1, 0, 2]], "ends before it begins"),
        ([[1, 4, 17]], "outside 0..16"),
        ([[1, 4, -1]], "outside 0..16"),
        ([[1, 4, 0]], "every K is 0"),
    ],
)
def test_ranges_that_mean_nothing_are_named(ranges: list[list[int]], problem: str) -> None:
    assert problem in (problem_of(ranges, 16) or "")
