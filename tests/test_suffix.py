"""Suffix decoding: its tree against counts by hand, and which texts a request's drafts may come from."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from spec_lab.core.types import Request, Sequence
from spec_lab.drafters.hybrid import HybridLookup
from spec_lab.drafters.suffix import SuffixLookup, SuffixSizes
from spec_lab.drafters.suffix_tree import DraftLimits, SuffixTree
from spec_lab.record.acceptance import parts
from spec_lab.record.metric import Measured
from spec_lab.record.recorder import request_row
from tests.graph_lab import MODES
from tests.lab import generate, make_config, make_engine, make_pair, random_requests

LEAST = 0.1


def slow_draft(texts: list[list[int]], tail: list[int], most: int, depth: int) -> tuple[float, list[int]] | None:
    """The best draft by counting in the texts; None where two tokens are equally likely, and either may stand."""
    best: tuple[float, list[int]] = (0.0, [])
    for length in range(1, len(tail) + 1):
        score, probability, draft = 0.0, 1.0, list[int]()
        for _ in range(min(most, length, depth - length)):
            stretch = tail[-length:] + draft
            parts = [text[i : i + len(stretch) + 1] for text in texts for i in range(len(text) - len(stretch) + 1)]
            found = [part for part in parts if part[: len(stretch)] == stretch]
            behind = Counter(part[-1] for part in found if len(part) > len(stretch)).most_common(2)
            if not behind or probability * behind[0][1] / len(found) < LEAST:
                break
            if len(behind) == 2 and behind[0][1] == behind[1][1]:
                return None
            probability *= behind[0][1] / len(found)
            score += probability
            draft.append(behind[0][0])
        if draft and score >= best[0]:
            best = score, draft
    return best


def test_the_tree_drafts_what_followed_most_often_also_behind_texts_that_it_forgot() -> None:
    generator, num_drafts = random.Random(0), 0
    for _ in range(400):
        tree, depth = SuffixTree(depth=18), 18
        texts = [[generator.randrange(3) for _ in range(generator.randint(1, 12))] for _ in range(3)]
        names = []
        for text in texts:
            names.append(tree.begin())
            for token in text:
                tree.extend([token])
        for _ in range(generator.randrange(3)):
            tree.forget(names.pop(0))
            texts.pop(0)
        tail = texts[-1] if generator.random() < 0.5 else [generator.randrange(3) for _ in range(6)]
        expected = slow_draft(texts, tail, 4, depth)
        if expected is not None:
            found = tree.look_up(tail, DraftLimits(4, 1.0, LEAST))
            assert texts[-1:] != [tail] or tree.look_up_own(DraftLimits(4, 1.0, LEAST)) == found
            assert (found.score, found.tokens) == (pytest.approx(expected[0]), expected[1])
            num_drafts += len(found.tokens)
    assert num_drafts > 100


def test_a_stretch_longer_than_the_depth_is_not_counted() -> None:
    tree = SuffixTree(depth=4)
    tree.begin()
    tree.extend([1, 2, 3, 4, 5, 6] * 20)
    assert tree.look_up([1, 2, 3, 4, 5, 6], DraftLimits(4, 2.0, 0.0)).tokens == [1, 2]


SIZES = SuffixSizes(depth=12, limits=DraftLimits(3, 1.0, LEAST), num_outputs=1)


def running(slot: int, prompt: tuple[int, ...], output: list[int]) -> Sequence:
    request = Request(f"r{slot}", "x", prompt, 9)
    return Sequence(request, slot, [], admitted_at=0.0, tokens=[*prompt, *output])


def test_drafts_come_from_the_request_and_from_ended_outputs_alone() -> None:
    texts, first = SuffixLookup(SIZES), running(0, (1, 2, 3, 4, 5), [1, 2])
    texts.admit(0, first.request)
    assert texts.look_up(first).tokens == [3, 4], "its own prompt goes on so"
    first.tokens += [7, 8, 9, 10]
    second = running(1, (3, 4), [7, 8])
    texts.admit(1, second.request)
    assert texts.look_up(second).tokens == [], "the other request still runs"
    texts.finish(first)
    assert texts.look_up(second).tokens == [9, 10]
    third = running(0, (1, 2, 3, 6), [1, 2, 3])
    texts.admit(0, third.request)
    assert texts.look_up(third).tokens == [6, 1, 2], "prompts of others, and its slot's, are not looked at"
    texts.finish(third)
    assert texts.look_up(second).tokens == [], "one output is kept, the newest"


def test_the_head_drafts_where_it_had_more_accepted_than_the_tree_expects() -> None:
    """Its mean moves with its own rounds alone; a new request begins with that of all."""
    lookup, request = HybridLookup(SIZES, ("suffix", "head"), head_drafts=1), running(0, (1, 2, 3), [1, 2])
    lookup.admit(0, request.request)
    assert lookup.draft([request]) == [[3, 1]], "twice a half, and the head is expected to have a half"
    request.drafted_by, request.accepted_per_round = ["suffix"] * 9, [3] * 9
    assert lookup.draft([request]) == [[3, 1]]
    request.drafted_by += ["head"] * 9
    request.accepted_per_round += [1] * 9
    request.tokens += [3, 9, 9, 8, 1]
    assert lookup.draft([request]) == [None], "one match of one token, and 0.93 of the head"
    other = running(1, (5, 6), [5])
    lookup.admit(1, other.request)
    assert lookup.draft([other]) == [None]
    lookup.restart()
    lookup.admit(1, other.request)
    other.tokens += [6, 5]
    assert lookup.draft([other]) == [[6, 5]]


def test_the_trees_scores_count_for_what_came_true_of_them_offered_or_not() -> None:
    """Of a text that goes on otherwise than its prompt, and then as it."""
    stretches = [(10 * i, 10 * i + 1, 10 * i + 2) for i in range(1, 17)]
    lookup, request = HybridLookup(SIZES, ("suffix", "head"), head_drafts=1), running(0, tuple(sum(stretches, ())), [])
    lookup.admit(0, request.request)
    offers = []
    for number, (first, second, third) in enumerate(stretches):
        request.tokens += [first, second]
        offers += lookup.draft([request])
        request.tokens += [third if number >= 8 else 500 + number]
    assert offers[0] == [12, 20] and offers[7] is None and offers[8] is None
    assert offers[-1] is not None, "what it was not asked for came true"


@pytest.mark.parametrize("graph", [None, "round"])
def test_a_record_says_which_part_drafted(tmp_path: Path, graph: str | None) -> None:
    """Rounds without a draft of the tree have the rows of the head's alone, also where they are captured."""
    requests = random_requests(3, max_new_tokens=20, lengths=(30, 40), vocab_size=12)
    pair, head = make_pair(tmp_path), 2
    config = make_config(pair, "hybrid", 5, batch_size=1, options={"path": str(pair[1]), "head_drafts": head})
    result = make_engine(config if graph is None else replace(config, graph=MODES[graph]), requests).generate(requests)
    assert {r.request_id: r.output_ids for r in result.requests} == generate(make_config(pair, "none"), requests)
    counts = parts(Measured([request_row(record) for record in result.requests]))
    assert counts is not None and set(counts) == {"suffix", "eagle3"}
    by_head = [name == "eagle3" for record in result.requests for name in record.drafted_by]
    rows = [record.rows for record in result.rounds]
    assert {each.offered for each, headed in zip(rows, by_head, strict=True) if headed} == {head}
    assert {each.verified for each, headed in zip(rows, by_head, strict=True) if headed} == {head + 1}
    assert sum(each.offered for each in rows) == counts["suffix"]["offered"] + counts["eagle3"]["offered"]


def test_a_pass_over_a_workload_knows_nothing_of_the_one_before(tmp_path: Path) -> None:
    """Else a repeat would find its own outputs, and be accepted whole."""
    requests = random_requests(3, max_new_tokens=16)
    engine = make_engine(make_config(make_pair(tmp_path), "suffix", 4, batch_size=2), requests)
    first, second = (engine.generate(requests) for _ in range(2))
    assert [r.offered_per_round for r in first.requests] == [r.offered_per_round for r in second.requests]
    offered = [count for record in first.requests for count in record.offered_per_round]
    assert {0, 1} <= set(offered), "a round offers what was found"
    assert sum(record.rows.offered for record in first.rounds) == sum(offered)
