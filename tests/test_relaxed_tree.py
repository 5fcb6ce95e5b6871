"""Relaxed acceptance on trees: against the rule in plain Python over small trees, and the chain's rule on chains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import pytest
import torch

from spec_lab.acceptance.phase import RelaxationPhase, RoundPhase, ThinkingMarkers, TokenPhase
from spec_lab.acceptance.relaxed import DeltaForm, RatioForm, RelaxedForm, RelaxedThinkingAcceptance
from spec_lab.acceptance.relaxed_tree import RelaxedThinkingTreeAcceptance
from spec_lab.core.tree_protocols import JudgedRows
from spec_lab.core.types import Verification
from tests.acceptance_cases import CPU, emitted, make_inputs, request

BEGIN, END, EOS, VOCAB = 2, 3, 4, 5
MARKERS = ThinkingMarkers(BEGIN, END)
NUM_DRAFTS = 3
FORMS: dict[str, RelaxedForm] = {"delta": DeltaForm(0.2), "ratio": RatioForm(0.5)}


@dataclass(frozen=True, slots=True)
class Case:
    """A tree of tokens below token 0, and whether the text in front of it leaves thinking open."""

    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    thinking: bool


def cases() -> Iterator[Case]:
    """Every tree of three drafts of which siblings differ, in both phases."""
    for parents in product([0], [0], [0, 1], [0, 1, 2]):
        for drafts in product(range(VOCAB), repeat=NUM_DRAFTS):
            if len(set(zip(parents[1:], drafts, strict=True))) == NUM_DRAFTS:
                yield from (Case(parents, (0, *drafts), thinking) for thinking in (False, True))


def target_rows(count: int) -> torch.Tensor:
    """[count, N, vocab] logits of few different values, so that there are ties and equalities."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 4, (count, NUM_DRAFTS + 1, VOCAB), generator=generator).float() / 2


def by_hand(case: Case, logits: torch.Tensor, form: RelaxedForm, topk: int, by_token: bool) -> tuple[list[int], int]:
    """The emitted tokens, and how many of them are near misses: the rule as it is said."""
    row, inside, tokens, relaxed = 0, case.thinking, [], 0
    while True:
        p = torch.softmax(logits[row], 0)
        order = sorted(range(VOCAB), key=lambda token: (-float(logits[row, token]), token))
        least = form.threshold(p.max())
        acceptable = {}
        for child, (parent, token) in enumerate(zip(case.parents, case.tokens, strict=True)):
            if child == 0 or parent != row:
                continue
            near = order.index(token) < topk
            if by_token:
                near = near and inside and token not in (BEGIN, END, EOS) and bool(p[token] >= least)
            else:
                near = near and bool(p[token] >= (least if case.thinking else p.max()))
            if near or token == order[0]:
                acceptable[order.index(token)] = child
        if not acceptable:
            return [*tokens, order[0]], relaxed
        row = acceptable[min(acceptable)]
        relaxed += min(acceptable) > 0
        tokens.append(case.tokens[row])
        inside = (inside or tokens[-1] == BEGIN) and tokens[-1] != END


def make_phase(kind: str, num_slots: int) -> RelaxationPhase:
    if kind == "token":
        return TokenPhase(num_slots, MARKERS, [EOS], CPU)
    return RoundPhase(num_slots, MARKERS, 512, CPU)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["token", "round"])
def test_every_small_tree_is_walked_as_by_hand(kind: str, form: str) -> None:
    every = list(cases())
    phase = make_phase(kind, len(every))
    rule = RelaxedThinkingTreeAcceptance(FORMS[form], 3, phase)
    for slot, case in enumerate(every):
        rule.admit(slot, request((0, BEGIN) if case.thinking else (0,)))
    logits = target_rows(len(every))
    judged = JudgedRows(
        logits,
        torch.tensor([case.tokens for case in every]),
        torch.tensor([case.parents for case in every]),
        torch.ones(len(every), dtype=torch.bool),
        torch.arange(len(every)),
        torch.full((len(every),), 9),
    )
    walk = rule.walk(judged, NUM_DRAFTS)
    assert walk.verification.relaxed is not None and walk.verification.num_thinking is not None
    found = list(zip(emitted(walk.verification), walk.verification.relaxed.sum(dim=1).tolist(), strict=True))
    expected = [by_hand(case, of, FORMS[form], 3, kind == "token") for case, of in zip(every, logits, strict=True)]
    assert found == expected
    assert {len(tokens) for tokens, _ in found} == {1, 2, 3, 4} and {count for _, count in found} >= {0, 1, 2}
    for case, (tokens, _), path in zip(every, found, walk.path.tolist(), strict=True):
        assert [case.tokens[row] for row in path[1 : len(tokens)]] == tokens[:-1]
    thinking_after = phase.thinking.now(torch.arange(len(every))).tolist()
    assert thinking_after == [
        state_after(case.thinking, tokens) for case, (tokens, _) in zip(every, found, strict=True)
    ]


def state_after(inside: bool, tokens: list[int]) -> bool:
    for token in tokens:
        inside = (inside or token == BEGIN) and token != END
    return inside


@pytest.mark.parametrize("kind", ["token", "round"])
def test_a_tree_that_is_a_chain_is_judged_as_the_chain(kind: str) -> None:
    """Tokens, counts, near misses, tokens inside thinking and the phase that is left, over several rounds."""
    count, num_drafts = 400, 4
    generator = torch.Generator().manual_seed(1)
    chain = RelaxedThinkingAcceptance(FORMS["delta"], 3, make_phase(kind, count))
    tree = RelaxedThinkingTreeAcceptance(FORMS["delta"], 3, make_phase(kind, count))
    for slot in range(count):
        prompt = request((0, BEGIN) if slot % 2 else (0,))
        chain.admit(slot, prompt)
        tree.admit(slot, prompt)
    parents = torch.tensor([0, 0, 1, 2, 3]).expand(count, -1)
    for _ in range(3):
        logits = torch.randint(0, 4, (count, num_drafts + 1, VOCAB), generator=generator).float() / 2
        ranked = logits[:, :-1] + torch.randn((count, num_drafts, VOCAB), generator=generator) / 2
        tokens = torch.cat((torch.zeros(count, 1), ranked.argmax(-1)), dim=1).long()
        inputs = make_inputs(logits, tokens[:, 1:], active=torch.arange(count) % 7 > 0)
        expected = chain.accept(inputs)
        judged = JudgedRows(logits, tokens, parents, inputs.active, inputs.slot_ids, inputs.kv_lens)
        got = tree.walk(judged, num_drafts)
        assert_same(got.verification, expected)
        assert got.path.tolist() == [list(range(num_drafts + 1))] * count
        assert set(expected.num_emitted.tolist()) == {0, 1, 2, 3, 4, 5}


def assert_same(got: Verification, expected: Verification) -> None:
    assert emitted(got) == emitted(expected)
    assert got.relaxed is not None and expected.relaxed is not None and int(expected.relaxed.sum()) > 0
    assert torch.equal(got.relaxed, expected.relaxed) and got.relaxed.dtype == expected.relaxed.dtype
    assert got.num_thinking is not None and expected.num_thinking is not None
    assert torch.equal(got.num_thinking, expected.num_thinking)
