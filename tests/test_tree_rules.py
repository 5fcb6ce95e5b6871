"""Rules on a tree of drafts: sampling from the target is lossless, by enumeration; an imposed length takes a path."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch

from spec_lab.acceptance.distribution import SamplingParams
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.acceptance.phase import ThinkingMarkers, TokenPhase
from spec_lab.acceptance.relaxed import DeltaForm
from spec_lab.acceptance.relaxed_tree import RelaxedThinkingTreeAcceptance
from spec_lab.acceptance.tree import OneHotTreeAcceptance, StrictTreeAcceptance, SyntheticTreeAcceptance, follow
from spec_lab.config.groups import TreeConfig
from spec_lab.core.tree_protocols import JudgedRows, TreeRule, Walk
from spec_lab.core.types import Verification
from spec_lab.options.acceptance.imposed import Synthetic
from spec_lab.options.acceptance.lossless import Rejection, RejectionMethodChoice
from spec_lab.options.trees import DynamicTreeConfig, StaticTreeConfig
from tests.acceptance_cases import CPU
from tests.covering import each_value
from tests.graph_lab import MODES, SAMPLED, Lab, Rule, generate_watched, lab, mixed_requests, outcome
from tests.graph_lab import RULES as CHAIN_RULES
from tests.test_rejection import total_variation, variation_bound

__all__ = ["lab"]

# Below the root, token 0, stand 1 and 2; below the 1 stand 0 and 2, and below the last of these a 1.
TOKENS, PARENTS = [0, 1, 2, 0, 2, 1], [0, 0, 0, 1, 1, 4]
DEPTHS, DEPTH = [0, 1, 1, 2, 2, 3], 3
TARGET = torch.tensor([[0.2, 0.5, 0.3], [0.3, 0.1, 0.6], [0.6, 0.3, 0.1]])


def judged_rows(batch_size: int, active: bool = True) -> JudgedRows:
    """The tree above, to a target whose next token depends on the last one."""
    tokens = torch.tensor(TOKENS).expand(batch_size, -1)
    return JudgedRows(
        TARGET.log()[tokens],
        tokens,
        torch.tensor(PARENTS).expand(batch_size, -1),
        torch.full((batch_size,), active),
        torch.arange(batch_size),
        torch.full((batch_size,), 9),
    )


def emitted(walk: Walk) -> list[list[int]]:
    verification = walk.verification
    rows = zip(verification.tokens.tolist(), verification.num_emitted.tolist(), strict=True)
    return [tokens[:count] for tokens, count in rows]


def joint(length: int) -> torch.Tensor:
    """[3 ** length] probabilities of the tokens after token 0."""
    p = TARGET[0].double()
    for _ in range(length - 1):
        p = (p.unsqueeze(1) * TARGET.double().repeat(len(p) // 3, 1)).flatten()
    return p


def continued(tokens: list[int], length: int) -> torch.Tensor:
    """The law of `length` tokens of which the first are given."""
    mass, last = torch.ones(1, dtype=torch.float64), 0
    for place in range(length):
        if place < len(tokens):
            rows = torch.nn.functional.one_hot(torch.tensor([tokens[place]]), 3).double().expand(len(mass), -1)
        else:
            lasts = torch.arange(len(mass)) % 3 if place else torch.tensor([last])
            rows = TARGET.double()[lasts]
        mass = (mass.unsqueeze(1) * rows).flatten()
    return mass


def law_of(choose: Any) -> torch.Tensor:
    """The law of four tokens after a round in which `choose` turns the target's tokens behind all rows into those that
    are followed, over every such choice; what the round did not emit is continued by plain sampling."""
    choices = torch.tensor(list(product(range(3), repeat=len(TOKENS))))
    weights = torch.stack([TARGET.double()[TOKENS[row]][choices[:, row]] for row in range(len(TOKENS))]).prod(dim=0)
    judged = judged_rows(len(choices))
    tokens, num_emitted, path = follow(choose(choices), judged.tokens, judged.parents, judged.active, DEPTH)
    walk = Walk(Verification(tokens, num_emitted), path)
    law = torch.zeros(3**4, dtype=torch.float64)
    for tokens, weight in zip(emitted(walk), weights.tolist(), strict=True):
        law += weight * continued(tokens, 4)
    return law


def test_following_what_the_target_draws_is_lossless() -> None:
    """By enumeration of every draw at every row, all four tokens jointly."""
    assert (law_of(lambda choices: choices) - joint(4)).abs().max() < 1e-7


def test_draws_with_the_real_noise_follow_the_target() -> None:
    """The first two tokens of 40,000 requests, with paths of every length."""
    count = 40_000
    seeds = SlotSeeds(count, 0, CPU)
    seeds.values[:-1] = torch.arange(count)
    walk = OneHotTreeAcceptance(SamplingParams(1.0), seeds).walk(judged_rows(count), DEPTH)
    counts = walk.verification.num_emitted
    assert set(counts.tolist()) == {1, 2, 3, 4}
    first = walk.verification.tokens[:, :1]
    assert total_variation(first, joint(1), 3) < variation_bound(joint(1), count)
    went_on = counts > 1
    seconds = walk.verification.tokens[went_on, :2]
    pairs = joint(2).view(3, 3) * torch.tensor([[0.0], [1.0], [1.0]], dtype=torch.float64)
    expected = (pairs / pairs.sum()).flatten()
    assert total_variation(seconds, expected, 3) < variation_bound(expected, len(seconds))


def test_at_temperature_0_it_is_strict() -> None:
    rule = OneHotTreeAcceptance(SamplingParams(0.0), SlotSeeds(4, 0, CPU))
    got, expected = (each.walk(judged_rows(4), DEPTH) for each in (rule, StrictTreeAcceptance()))
    assert emitted(got) == emitted(expected) == [[1, 2, 0]] * 4
    assert got.path.tolist() == expected.path.tolist()


@pytest.mark.parametrize(("rate", "tokens"), [(0, [1]), (1, [1, 2]), (2, [1, 0, 1]), (3, [1, 2, 1, 2])])
def test_an_imposed_length_takes_the_first_path_as_long(rate: int, tokens: list[int]) -> None:
    """The token behind it is the target's argmax."""
    rates = [1.0] * rate + [0.0] * (DEPTH - rate)
    rule = SyntheticTreeAcceptance(rates, SlotSeeds(2, 0, CPU), CPU)
    walk = rule.walk(judged_rows(2), DEPTH)
    assert emitted(walk) == [tokens] * 2
    path = walk.path[0, : rate + 1].tolist()
    assert [DEPTHS[row] for row in path] == list(range(rate + 1))
    assert all(PARENTS[child] == row for row, child in pairwise(path))
    assert emitted(rule.walk(judged_rows(2, active=False), DEPTH)) == [[], []]


@pytest.mark.parametrize(
    "rule",
    [
        StrictTreeAcceptance(),
        OneHotTreeAcceptance(SamplingParams(0.0), SlotSeeds(2, 0, CPU)),
        SyntheticTreeAcceptance([1.0] * DEPTH, SlotSeeds(2, 0, CPU), CPU),
        RelaxedThinkingTreeAcceptance(DeltaForm(1.0), 3, TokenPhase(2, ThinkingMarkers(7, 8), [], CPU)),
    ],
    ids=["strict", "one_hot", "synthetic", "relaxed"],
)
def test_rows_that_are_their_own_parents_are_never_accepted(rule: TreeRule) -> None:
    """Row 1 holds the right token, but no draft."""
    judged = judged_rows(2)
    judged.parents = torch.tensor([[0, 1, 2, 3, 4, 5]] * 2)
    assert emitted(rule.walk(judged, DEPTH)) == [[1]] * 2


def test_imposed_rates_are_met_and_a_shallow_tree_gives_what_it_has() -> None:
    count = 20_000
    seeds = SlotSeeds(count, 0, CPU)
    seeds.values[:count] = torch.arange(count)
    rule = SyntheticTreeAcceptance([0.8, 0.5, 0.1], seeds, CPU)
    accepted = rule.walk(judged_rows(count), DEPTH).verification.num_emitted - 1
    for position, rate in enumerate([0.8, 0.5, 0.1]):
        assert float((accepted > position).double().mean()) == pytest.approx(rate, abs=0.015)
    flat = judged_rows(count)
    flat.parents = torch.zeros_like(flat.parents)
    assert set((rule.walk(flat, DEPTH).verification.num_emitted - 1).tolist()) == {0, 1}


DYNAMIC, STATIC = DynamicTreeConfig(topk=3, num_rows=9), StaticTreeConfig()
TRAVERSAL = Rule(Rejection(method=RejectionMethodChoice.traversal), SAMPLED, "distribution")
RULES: dict[str, tuple[Rule, TreeConfig]] = {
    "one_hot": (Rule(Rejection(method=RejectionMethodChoice.one_hot), SAMPLED), DYNAMIC),
    "synthetic": (Rule(Synthetic(rates=[0.7, 0.5, 0.3])), DYNAMIC),
    "traversal": (TRAVERSAL, STATIC),
    "relaxed": (CHAIN_RULES["relaxed"], DYNAMIC),
    "one_hot, drawn": (replace(TRAVERSAL, acceptance=Rejection(method="one_hot")), STATIC),
}


def test_traversal_of_a_chain_is_block_verification_bit_for_bit(lab: Lab) -> None:
    """Drafts, tokens and accepted lengths of whole requests, from the same noise."""
    requests = mixed_requests(3, 12)
    block = replace(TRAVERSAL, acceptance=Rejection(method="block"))
    chain = StaticTreeConfig(paths=[[0], [0, 0], [0, 0, 0]])
    engines = [
        lab.engine(requests, None, rule=rule, tree=tree, batch_size=2)
        for rule, tree in ((block, TreeConfig()), (TRAVERSAL, chain))
    ]
    expected, got = (outcome(*generate_watched(engine, requests)) for engine in engines)
    assert got == expected
    assert len({count for _, accepted, _ in got.values() for count in accepted}) > 1


@pytest.mark.parametrize(
    ("rule", "mode"),
    each_value([rule for rule in RULES if rule != "one_hot"], ("round", "full_loop", "split_seed", "overlap")),
)
def test_a_graph_gives_what_eager_gives(lab: Lab, rule: str, mode: str) -> None:
    requests = mixed_requests(4, 10)
    of_rule, tree = RULES[rule]
    options: dict[str, Any] = {"rule": of_rule, "batch_size": 2, "tree": tree}
    results = [lab.engine(requests, graph, **options).generate(requests) for graph in (None, MODES[mode])]
    eager, captured = ([(r.output_ids, r.accepted_per_round) for r in result.requests] for result in results)
    assert eager == captured
    assert {count for _, accepted in eager for count in accepted} >= {0, 1}
