"""Traversal verification of sampled siblings is lossless: by exact enumeration of every draft and every decision on toy
trees, and with the real noise. On a chain it is block verification, draw for draw.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product
from typing import Any

import pytest
import torch

from spec_lab.acceptance.distribution import SamplingParams
from spec_lab.acceptance.draft_sampling import DraftLogits
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.acceptance.rejection import METHODS, RejectionAcceptance
from spec_lab.acceptance.traversal import TraversalAcceptance, branch_levels, traversal_decision, without
from spec_lab.core.draft_paths import DraftPaths
from spec_lab.core.tree_protocols import JudgedRows
from spec_lab.core.types import AcceptanceInputs
from spec_lab.drafters.picking import DraftedRows
from spec_lab.drafters.siblings import DrawnSiblings
from tests.acceptance_cases import CPU
from tests.test_rejection import total_variation, variation_bound

VOCAB = 3
TREES = {
    "one level of two": [[0], [1]],
    "one level of all": [[0], [1], [2]],
    "two levels of two": [[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]],
    "deep on one side": [[0], [1], [0, 0], [0, 1], [0, 0, 0], [0, 0, 1]],
    "deep below the second": [[0], [1], [1, 0], [1, 1], [1, 0, 0]],
    "a chain": [[0], [0, 0], [0, 0, 0]],
}
Text = tuple[int, ...]
Law = dict[Text, torch.Tensor]


def law(seed: int, sharpness: float) -> Law:
    """Probabilities [vocab] behind every text of up to 3 tokens, in float64."""
    generator = torch.Generator().manual_seed(seed)
    texts = [text for length in range(4) for text in product(range(VOCAB), repeat=length)]
    return {text: torch.softmax(torch.randn(VOCAB, generator=generator).double() * sharpness, 0) for text in texts}


def with_holes(probabilities: Law) -> Law:
    """A token that is never drafted, another one behind each text."""
    holes = {text: row.scatter(0, torch.tensor(len(text) % VOCAB), 0.0) for text, row in probabilities.items()}
    return {text: row / row.sum() for text, row in holes.items()}


TARGET = law(1, 1.0)
PROPOSALS = {
    "other": law(2, 1.5),
    "far": {text: (1 - row) ** 8 / ((1 - row) ** 8).sum() for text, row in TARGET.items()},
    "equal": TARGET,
    "slots": {text: TARGET[(0,) * len(text)] for text in TARGET},  # as of a block without a head
    "holes": with_holes(law(3, 1.0)),
    "certain": {text: torch.eye(VOCAB, dtype=torch.float64)[len(text) % VOCAB] for text in TARGET},
}


def drawings(q: torch.Tensor, count: int, replacement: bool) -> Iterator[tuple[Text, float]]:
    """All ways to draw so many siblings, each with its probability; where tokens run out any other one stands in."""
    for tokens in product(range(VOCAB), repeat=count) if replacement else permutations(range(VOCAB), count):
        chance, left = 1.0, q.clone()
        for token in tokens:
            mass = float(left.sum())
            if mass > 0:
                chance *= float(left[token]) / mass
            elif token != min(set(range(VOCAB)) - set(tokens[: tokens.index(token)])):
                chance = 0.0
            if not replacement:
                left[token] = 0
        if chance > 0:
            yield tokens, chance


def drafted(paths: DraftPaths, proposal: Law, replacement: bool) -> Iterator[tuple[list[Text], float]]:
    """Every tree that can be drafted, as the text of each row, with its probability."""

    def grown(texts: dict[int, Text], branches: list[int], chance: float) -> Iterator[tuple[list[Text], float]]:
        if not branches:
            yield [texts[row] for row in range(len(paths.paths))], chance
            return
        row, children = branches[0], paths.children[branches[0]]
        for tokens, of_these in drawings(proposal[texts[row]], len(children), replacement):
            below = {child: (*texts[row], token) for child, token in zip(children, tokens, strict=True)}
            yield from grown(texts | below, branches[1:], chance * of_these)

    yield from grown({0: ()}, paths.branches, 1.0)


def emitted_law(tree: list[list[int]], proposal: Law, replacement: bool, decide: Any = traversal_decision) -> Law:
    """The probability of every text of 4 tokens: a round's, continued as the target would."""
    paths = DraftPaths(tree)
    trees, chances = zip(*drafted(paths, proposal, replacement), strict=True)
    p = torch.stack([torch.stack([TARGET[text] for text in texts]) for texts in trees])
    q = torch.stack([torch.stack([proposal[texts[row]] for row in paths.branches]) for texts in trees])
    tokens = torch.tensor([[0, *(text[-1] for text in texts[1:])] for texts in trees])
    decision = decide(p, q, tokens, branch_levels(paths, CPU), replacement)
    assert ((decision.thresholds >= 0) & (decision.thresholds <= 1)).all()
    found: dict[Text, float] = {}
    for index, (texts, chance) in enumerate(zip(trees, chances, strict=True)):
        for row in paths.leaves_first():
            here = chance * (float(decision.thresholds[index, row]) if row else 1.0)
            chance -= here
            weights = decision.weights[index, row]
            for token, share in enumerate((weights / weights.sum()).tolist()):
                text = (*texts[row], token)
                found[text] = found.get(text, 0.0) + here * share
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)
    return {text: torch.tensor(mass, dtype=torch.float64) for text, mass in found.items()}


def error_of(found: Law) -> float:
    """The largest difference to the target's law over all texts of 4 tokens."""
    worst = 0.0
    for text in product(range(VOCAB), repeat=4):
        expected = 1.0
        got = 0.0
        for length in range(4):
            expected *= float(TARGET[text[:length]][text[length]])
        for length in range(1, 5):
            rest = 1.0
            for place in range(length, 4):
                rest *= float(TARGET[text[:place]][text[place]])
            got += float(found.get(text[:length], 0.0)) * rest
        worst = max(worst, abs(got - expected))
    return worst


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("tree", TREES)
def test_every_text_has_the_probability_of_plain_sampling(tree: str, replacement: bool) -> None:
    """All texts of four tokens jointly, whatever the drafter is worth; its tokens may run out below a branch."""
    for name, proposal in PROPOSALS.items():
        assert error_of(emitted_law(TREES[tree], proposal, replacement)) < 1e-14, name


def test_more_drafts_are_accepted_than_one_by_one() -> None:
    """A second sibling, and siblings below it, have something to give."""

    def mean_length(tree: list[list[int]]) -> float:
        return sum(len(text) * float(mass) for text, mass in emitted_law(tree, PROPOSALS["other"], False).items())

    chain, pair, full = (mean_length(TREES[name]) for name in ("a chain", "one level of two", "two levels of two"))
    assert 1 < pair < full and chain < full


def test_what_is_left_of_a_distribution_is_one_again_however_little_it_is() -> None:
    q = torch.tensor([[1 - 1e-12, 0.75e-12, 0.25e-12], [1.0, 0.0, 0.0]], dtype=torch.float64)
    left = without(q, torch.tensor([0, 0]))
    torch.testing.assert_close(left, torch.tensor([[0, 0.75, 0.25], [0.0, 0, 0]]).double(), rtol=1e-12, atol=0)


def judged(tokens: torch.Tensor, logits: torch.Tensor, parents: list[int], draft_logits: torch.Tensor) -> JudgedRows:
    count = len(tokens)
    slots = torch.arange(count)
    parents_of = torch.tensor(parents).expand(count, -1)
    return JudgedRows(logits, tokens, parents_of, slots % 5 != 4, slots, 9 + slots % 3, draft_logits)


@pytest.mark.parametrize("vocab_size", [2047, 2048, 4096, 151936])
def test_what_is_left_of_a_uniform_distribution_is_uniform_however_large_the_vocabulary(vocab_size: int) -> None:
    q = torch.full((1, vocab_size), 1 / vocab_size)
    left = without(q, torch.tensor([3]))
    expected = torch.full_like(q, 1 / (vocab_size - 1))
    expected[0, 3] = 0
    torch.testing.assert_close(left, expected, rtol=1e-5, atol=0)


def test_of_a_chain_it_takes_the_decisions_of_block_verification() -> None:
    """The same tokens and counts from the same noise, with sizes at which thresholds of every kind occur."""
    count, num_drafts, vocab = 3000, 3, 7
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((count, num_drafts + 1, vocab), generator=generator) * 2
    draft_logits = logits[:, :-1] + torch.randn((count, num_drafts, vocab), generator=generator)
    tokens = torch.cat((torch.zeros(count, 1), torch.softmax(draft_logits, -1).flatten(0, 1).multinomial(
        1, generator=generator
    ).view(count, num_drafts)), dim=1).long()  # fmt: skip
    seeds, sampling = SlotSeeds(count, 0, CPU), SamplingParams(0.9, top_k=6)
    seeds.values[:-1] = torch.arange(count)
    rows = judged(tokens, logits, [0, 0, 1, 2], draft_logits)
    walk = TraversalAcceptance(DraftPaths(TREES["a chain"]), sampling, seeds, CPU).walk(rows, num_drafts)
    inputs = AcceptanceInputs(logits, tokens[:, 1:], rows.active, rows.slot_ids, rows.kv_lens, draft_logits)
    expected = RejectionAcceptance(METHODS["block"], sampling, seeds).accept(inputs)
    assert torch.equal(walk.verification.num_emitted, expected.num_emitted)
    assert set(expected.num_emitted.tolist()) == {0, 1, 2, 3, 4}
    emitted = torch.arange(num_drafts + 1) < expected.num_emitted.unsqueeze(1)
    assert torch.equal(walk.verification.tokens[emitted], expected.tokens[emitted])
    assert walk.path.tolist() == [[0, 1, 2, 3]] * count


@pytest.mark.parametrize("replacement", [False, True])
def test_drawn_siblings_and_real_noise_follow_the_target(replacement: bool) -> None:
    """40,000 requests draw a tree each, as a drafter does level by level; their first two tokens are the target's."""
    count, paths = 40_000, DraftPaths(TREES["two levels of two"])
    seeds = SlotSeeds(count, 0, CPU)
    seeds.values[:-1] = torch.arange(count)
    kept = DraftLogits(count, len(paths.branches), VOCAB, CPU)
    siblings = DrawnSiblings(paths, 2, replacement, 0.5, seeds, kept)
    rows = DraftedRows(torch.arange(count), torch.full((count,), 9))
    texts = product(range(VOCAB), repeat=2)
    draft = torch.stack([PROPOSALS["other"][text].log().float() * 0.5 for text in [(), (0,), (1,), (2,)]])
    first = siblings.draw(draft[0].expand(count, 1, -1), rows, 0).tokens[:, 0]
    second = siblings.draw(draft[1 + first], rows, 1).tokens
    assert (first[:, 0] == first[:, 1]).any() == replacement
    tokens = torch.cat((torch.zeros(count, 1, dtype=torch.int64), first, second.flatten(1)), dim=1)
    after = {text: TARGET[text].log().float() for text in [(), (0,), (1,), (2,), *texts]}
    by_pair = torch.stack([after[text] for text in product(range(VOCAB), repeat=2)])
    behind_first = torch.stack([after[(token,)] for token in range(VOCAB)])[first]
    behind_second = by_pair[(first.unsqueeze(2) * VOCAB + second).flatten(1)]
    logits = torch.cat((after[()].expand(count, 1, -1), behind_first, behind_second), dim=1)
    draws = kept.of(rows.slot_ids)
    judged_rows = JudgedRows(
        logits, tokens, torch.tensor(paths.parents).expand(count, -1), torch.ones(count).bool(), *(
            (rows.slot_ids, rows.kv_lens, draws)
        )
    )  # fmt: skip
    rule = TraversalAcceptance(paths, SamplingParams(1.0), seeds, CPU, replacement)
    verification = rule.walk(judged_rows, 2).verification
    assert set(verification.num_emitted.tolist()) == {1, 2, 3}
    p = TARGET[()]
    assert total_variation(verification.tokens[:, :1], p, VOCAB) < variation_bound(p, count)
    # A round that ends with its first token is continued as the target would.
    seconds = torch.where(
        verification.num_emitted > 1,
        verification.tokens[:, 1],
        torch.stack([TARGET[(token,)] for token in range(VOCAB)])[verification.tokens[:, 0]].multinomial(
            1, generator=torch.Generator().manual_seed(0)
        )[:, 0],
    )
    pairs = (p.unsqueeze(1) * torch.stack([TARGET[(token,)] for token in range(VOCAB)])).flatten()
    both = torch.stack((verification.tokens[:, 0], seconds), dim=1)
    assert total_variation(both, pairs, VOCAB) < variation_bound(pairs, count)
