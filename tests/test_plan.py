"""Plans: whatever shapes follow each other, the text is plain decoding's, and the drafter misses nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence as List
from dataclasses import replace
from typing import Any

import pytest
import torch

from spec_lab.config.option import option
from spec_lab.core.results import GenerationResult
from spec_lab.core.types import Request, Sequence
from spec_lab.engine.costs import CostTable
from spec_lab.engine.plan import OFF, Choice, Shape
from tests.covering import each_value
from tests.graph_lab import DRAFTERS, MODES, RULES, Lab, generate_watched, lab, mixed_requests

__all__ = ["lab"]


class DrawnPlan:
    """Chooses any shape that a plan may choose, with equal probabilities of off and on."""

    needs_costs = False
    costs: CostTable | None = None

    def __init__(self, most: int) -> None:
        self._most = most
        self.restart()

    def restart(self) -> None:
        self._draw = random.Random(0)
        self.chosen: list[Shape] = []

    def admit(self, slot: int, request: Request) -> None:
        pass

    def choose(self, sequences: List[Sequence]) -> Choice:
        is_off = self._draw.random() < 0.5
        shape = OFF if is_off else Shape(self._draw.randint(0, self._most), self._draw.randint(1, self._most))
        self.chosen.append(shape)
        return Choice(shape)

    def note(self, sequences: List[Sequence]) -> None:
        pass


@option("drafter.plan", "drawn")
class Drawn:
    def build(self, lab: Any) -> DrawnPlan:
        return DrawnPlan(lab.run.drafter.num_draft_tokens)


DRAWN = {"options": {"plan": "drawn"}}


def texts(result: GenerationResult) -> dict[str, list[int]]:
    return {record.request_id: record.output_ids for record in result.requests}


def text_and_offers(result: GenerationResult) -> dict[str, Any]:
    return {r.request_id: (r.output_ids, r.offered_per_round, r.accepted_per_round) for r in result.requests}


@pytest.mark.parametrize(("mode", "drafter"), each_value(MODES, (*DRAFTERS, "ngram")))
def test_text_is_plain_decodings_whatever_a_plan_chooses(lab: Lab, mode: str, drafter: str) -> None:
    requests = mixed_requests(5, 24)
    options = {"drafter": drafter, "batch_size": 3, "rule": RULES["strict"], **DRAWN}
    captured = lab.engine(requests, MODES[mode], **options).generate(requests)
    eager = lab.engine(requests, None, **options).generate(requests)
    plain = lab.engine(requests, None, "none", batch_size=3).generate(requests)
    assert texts(captured) == texts(eager) == texts(plain)
    if mode != "overlap":  # whose batches also hold requests that have ended
        assert text_and_offers(captured) == text_and_offers(eager)
    rows = [record.rows for record in captured.rounds]
    assert {count for r in captured.requests for count in r.offered_per_round} == {0, 1, 2, 3}
    assert any(each.drafted == 0 for each in rows) and any(each.drafted and not each.offered for each in rows)


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
