"""Plans: whatever shapes follow each other, the text is plain decoding's, and the drafter misses nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from spec_lab.acceptance import rejection, relaxed, strict
from spec_lab.config.run import RecordConfig
from spec_lab.core.results import GenerationResult
from spec_lab.core.types import Request
from spec_lab.engine.engine import Engine
from spec_lab.measure.launch_counts import CountedRounds
from spec_lab.measure.watched_rounds import watch_rounds
from spec_lab.options.trees import DynamicTreeConfig
from tests import drawn_plan  # registers a plan
from tests.covering import each_value
from tests.graph_lab import DRAFTERS, MODES, RULES, Lab, generate_watched, lab, mixed_requests

__all__ = ["drawn_plan", "lab"]


DRAWN = {"options": {"plan": "drawn"}}


def texts(result: GenerationResult) -> dict[str, list[int]]:
    return {record.request_id: record.output_ids for record in result.requests}


def text_and_offers(result: GenerationResult) -> dict[str, Any]:
    return {r.request_id: (r.output_ids, r.offered_per_round, r.accepted_per_round) for r in result.requests}


def assert_text_is_plain_decodings(lab: Lab, mode: str, drafter: str, **changes: Any) -> GenerationResult:
    """Check so whatever a plan chooses, captured and eagerly. Return what was eager."""
    requests = mixed_requests(5, 24)
    options = {"drafter": drafter, "batch_size": 3, "rule": RULES["strict"], **DRAWN, **changes}
    captured = lab.engine(requests, MODES[mode], **options).generate(requests)
    eager = lab.engine(requests, None, **options).generate(requests)
    plain = lab.engine(requests, None, "none", batch_size=3).generate(requests)
    assert texts(captured) == texts(eager) == texts(plain)
    if mode != "overlap":  # whose batches also hold requests that have ended
        assert text_and_offers(captured) == text_and_offers(eager)
    return eager


@pytest.mark.parametrize(("mode", "drafter"), each_value(MODES, (*DRAFTERS, "ngram")))
def test_text_is_plain_decodings_whatever_a_plan_chooses(lab: Lab, mode: str, drafter: str) -> None:
    eager = assert_text_is_plain_decodings(lab, mode, drafter)
    rows = [record.rows for record in eager.rounds]
    assert {count for r in eager.requests for count in r.offered_per_round} == {0, 1, 2, 3}
    assert any(each.drafted == 0 for each in rows) and any(each.drafted and not each.offered for each in rows)


TREE_MODES = tuple(name for name in MODES if name != "step_replay")
TREE_DRAFTERS = (*(name for name in DRAFTERS if name != "mtp_vanilla"), "ngram")


@pytest.mark.parametrize(("mode", "drafter"), each_value(TREE_MODES, TREE_DRAFTERS))
def test_a_plan_cuts_a_dynamic_tree_to_its_first_rows(lab: Lab, mode: str, drafter: str) -> None:
    tree = DynamicTreeConfig(topk=3, depth=3, num_rows=8)
    eager = assert_text_is_plain_decodings(lab, mode, drafter, tree=tree)
    rounds = [(record.rows.verified // len(record.request_ids), record.rows.drafted) for record in eager.rounds]
    assert len({rows for rows, _ in rounds} - {1}) > 3 and {0, 7} <= {drafted for _, drafted in rounds}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_what_a_drafter_missed_stands_in_its_cache_as_if_it_had_seen_it(lab: Lab, drafter: str) -> None:
    requests = [replace(request, ignore_eos=True, max_new_tokens=40) for request in mixed_requests(2, 40)]
    options = {"drafter": drafter, "batch_size": 2, "rule": RULES["strict"]}
    result, watch = generate_watched(lab.engine(requests, MODES["round"], **options, **DRAWN), requests)
    expected, full = generate_watched(lab.engine(requests, MODES["round"], **options), requests)
    assert texts(result) == texts(expected)
    for name, caches in watch.committed.items():
        for path, cache in caches.items():
            other = full.committed[name][path]
            dim = cache.dim() - 4
            # The last rounds may have gone on behind the limit, or have left their rows in the ring.
            num_rows = min(cache.shape[dim], other.shape[dim]) - (16 if path.startswith("drafter") else 0)
            pair = (part.narrow(dim, 0, num_rows) for part in (cache, other))
            torch.testing.assert_close(*pair, rtol=0, atol=1e-4)


def test_sampled_drafts_are_judged_alike(lab: Lab) -> None:
    requests = mixed_requests(5, 16)
    options = {"batch_size": 3, "rule": RULES["sampled"], **DRAWN}
    captured = lab.engine(requests, MODES["round"], **options).generate(requests)
    eager = lab.engine(requests, None, **options).generate(requests)
    assert text_and_offers(captured) == text_and_offers(eager)
    assert {count for record in eager.requests for count in record.accepted_per_round} != {0}


@pytest.mark.parametrize("drafter", ["eagle3", "frozen_kv"])
@pytest.mark.parametrize("plan", ["none", "drawn"])
def test_confidences_are_kept_for_each_offered_draft(lab: Lab, plan: str, drafter: str) -> None:
    """None is above the one before it; a graph keeps what eager rounds keep."""
    requests = mixed_requests(3, 12)
    options = {"batch_size": 3, "rule": RULES["strict"], "record": RecordConfig(confidences=True)}
    found: list[list[float]] = []
    for mode in (None, MODES["round"]):
        result = lab.engine(requests, mode, drafter, options={"plan": plan}, **options).generate(requests)
        rounds = [
            pair for r in result.requests for pair in zip(r.confidence_per_round, r.offered_per_round, strict=True)
        ]
        assert all(len(confidences) == num_offered for confidences, num_offered in rounds)
        assert all(confidences == sorted(confidences, reverse=True) for confidences, _ in rounds)
        found.append([each for confidences, _ in rounds for each in confidences])
    assert found[0] == pytest.approx(found[1], abs=1e-5) and len(found[0]) > 10


# What nobody asked for costs nothing.


def counted(engine: Engine, requests: list[Request]) -> float:
    work = watch_rounds(engine, requests, 3, CountedRounds).work()
    assert work is not None
    launches = work["launches_per_round"]
    assert launches is not None
    return launches


@pytest.mark.parametrize("rule", ["strict", "relaxed", "sampled"])
def test_rounds_that_offer_all_run_no_operator_for_it(lab: Lab, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as with rules that never heard of offers."""
    requests = mixed_requests(2, 12)
    options = {"batch_size": 2, "rule": RULES[rule]}
    engine = lab.engine(requests, None, **options)
    all_offered = counted(engine, requests)
    for module in (relaxed, rejection, strict):
        monkeypatch.setattr(module, "only_offered", lambda passed, num_drafts: passed)
    monkeypatch.setattr(rejection, "offered_proposal", lambda method, inputs: method.proposal(inputs))
    assert counted(lab.engine(requests, None, **options), requests) == all_offered
