"""Relaxed acceptance inside thinking: worked examples, TensorRT-LLM's own cases, the phase of every token."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from spec_lab.acceptance.phase import ThinkingMarkers, phase_before, thinking_mask
from spec_lab.acceptance.relaxed import DeltaForm, RatioForm, RelaxedThinkingAcceptance
from spec_lab.acceptance.standing import draft_standing
from tests.acceptance_cases import (
    MARKERS,
    Row,
    emitted,
    first_token,
    logits_of,
    make_inputs,
    peaked,
    relaxed_rule,
    request,
)

BEGIN, END = MARKERS.begin, MARKERS.end
R0: Row = {1: 0.5, 2: 0.3, 3: 0.1, 0: 0.1}
R1: Row = {3: 0.45, 5: 0.40, 1: 0.15}
R2: Row = {2: 0.8, 4: 0.15, 0: 0.05}
R3: Row = {4: 0.9, 0: 0.1}

THINKING, ANSWERING = (0, BEGIN), (0,)
# name: prompt, delta, topk, rows, drafts, tokens under phase=round, tokens under phase=token, thinking afterwards
WORKED = {
    "R1 two relaxed hits": (THINKING, 0.25, 3, [R0, R1, R2, R3], [2, 5, 4], [2, 5, 2], [2, 5, 2], True),
    "R2 not thinking": (ANSWERING, 0.25, 3, [R0, R1, R2, R3], [2, 5, 4], [1], [1], False),
    "R3 equality passes": (
        THINKING, 0.25, 3, [{1: 0.5, 2: 0.25, 3: 0.25}, R1, R2, R3], [2, 3, 2], [2, 3, 2, 4], [2, 3, 2, 4], True,
    ),
    "R4 rank cut": (THINKING, 0.6, 3, [{1: 0.3, 2: 0.26, 3: 0.24, 0: 0.2}, R1, R2, R3], [0, 3, 2], [1], [1], True),
    "R5 end marker": (
        THINKING, 0.25, 3, [{7: 0.6, 2: 0.3, 0: 0.1}, {3: 0.5, 5: 0.45, 1: 0.05}, R2, R3], [7, 5, 4],
        [7, 5, 2], [7, 3], False,
    ),
    "R6 begin marker": (
        ANSWERING, 0.25, 3, [{6: 0.6, 2: 0.3, 0: 0.1}, {3: 0.5, 5: 0.45, 1: 0.05}, R2, R3], [6, 5, 4],
        [6, 3], [6, 5, 2], True,
    ),
    "R7 tie, not thinking": (
        ANSWERING, 0.25, 3, [{1: 0.4, 2: 0.4, 0: 0.2}, R1, R2, R3], [2, 3, 2], [2, 3, 2, 4], [1], False,
    ),
    "R7 tie, thinking, delta 0": (
        THINKING, 0.0, 3, [{1: 0.4, 2: 0.4, 0: 0.2}, R1, R2, R3], [2, 3, 2], [2, 3, 2, 4], [2, 3, 2, 4], True,
    ),
    "R8 argmax drafts": (THINKING, 0.25, 3, [R0, R1, R2, R3], [1, 3, 2], [1, 3, 2, 4], [1, 3, 2, 4], True),
    "R9 topk 1 is strict": (THINKING, 0.6, 1, [R0, R1, R2, R3], [2, 3, 2], [1], [1], True),
}  # fmt: skip


def relaxes(rule: RelaxedThinkingAcceptance, slot: int) -> bool:
    """Whether the rule now accepts a second choice in `slot`; the tokens it emits are no markers."""
    logits = logits_of([{1: 0.5, 2: 0.4, 3: 0.1}, {4: 1.0}]).unsqueeze(0)
    verification = rule.accept(make_inputs(logits, [[2]], slot_ids=torch.tensor([slot])))
    return emitted(verification) == [[2, 4]]


@pytest.mark.parametrize("phase", ["round", "token"])
@pytest.mark.parametrize("name", WORKED)
def test_worked_examples(name: str, phase: str) -> None:
    """The nine examples of the fact sheet; where ours and TensorRT-LLM's phase differ, both answers stand there."""
    prompt, delta, topk, rows, drafts, by_round, by_token, thinking_after = WORKED[name]
    rule = relaxed_rule(phase=phase, form=DeltaForm(delta), topk=topk)
    rule.admit(2, request(prompt))
    inputs = make_inputs(logits_of(rows).unsqueeze(0), [drafts], slot_ids=torch.tensor([2]))
    verification = rule.accept(inputs)
    expected = by_round if phase == "round" else by_token
    assert emitted(verification) == [expected]
    strict = [max(row, key=lambda token: (row[token], -token)) for row in rows]
    relaxed = [token != top for token, top in zip(expected[:-1], strict, strict=False)]
    assert verification.relaxed.tolist() == [relaxed + [False] * (len(drafts) - len(relaxed))]
    if delta > 0 and topk > 1:
        assert relaxes(rule, 2) is thinking_after


@pytest.mark.parametrize(
    ("prompt", "by_token", "by_round"),
    [
        ((0, 1), False, False),
        ((0, BEGIN, 1), True, True),
        ((BEGIN, 1, END, 2), False, True),
        ((BEGIN, 1, END, 2, BEGIN), True, True),
        ((END, 1), False, False),
        ((BEGIN, 1, 1, 1, 1, 1), True, False),
        ((1, 1, 1, 1, BEGIN, END), False, True),
        ((1, BEGIN, 1, 1), True, True),
    ],
)
def test_phase_starts_from_the_prompt(prompt: tuple[int, ...], by_token: bool, by_round: bool) -> None:
    """Ours: the last marker of the whole prompt. TensorRT-LLM: any begin marker of the last chunk, here of 4 tokens."""
    for phase, expected in (("token", by_token), ("round", by_round)):
        rule = relaxed_rule(phase=phase, prefill_chunk=4)
        rule.admit(1, request(prompt))
        first_token(rule, peaked([3]), 1, len(prompt))
        assert relaxes(rule, 1) is expected, phase


@pytest.mark.parametrize("phase", ["token", "round"])
@pytest.mark.parametrize(("prompt", "token", "expected"), [(ANSWERING, BEGIN, True), (THINKING, END, False)])
def test_first_token_can_be_a_marker(phase: str, prompt: tuple[int, ...], token: int, expected: bool) -> None:
    rule = relaxed_rule(phase=phase)
    rule.admit(0, request(prompt))
    assert first_token(rule, peaked([token]), 0, len(prompt)).tolist() == [token]
    assert relaxes(rule, 0) is expected


@pytest.mark.parametrize("phase", ["token", "round"])
def test_a_reused_slot_forgets(phase: str) -> None:
    rule = relaxed_rule(phase=phase)
    rule.admit(1, request(THINKING))
    assert relaxes(rule, 1)
    rule.admit(1, request(ANSWERING))
    assert not relaxes(rule, 1)


def test_ratio_form() -> None:
    """It takes p >= ratio * p_top1, with equality; the delta form would take the small ones too."""
    for second, passes in ((0.2, True), (0.19, False)):
        rows = logits_of([{1: 0.4, 2: second, 3: 0.4 - second, 4: 0.2}, {5: 1.0}]).unsqueeze(0)
        rule = relaxed_rule(form=RatioForm(0.5), topk=4)
        rule.admit(0, request(THINKING))
        assert emitted(rule.accept(make_inputs(rows, [[2]]))) == [[2, 5] if passes else [1]]
    rows = logits_of([{1: 0.4, 2: 0.01, 3: 0.39, 4: 0.2}, {5: 1.0}]).unsqueeze(0)
    rule = relaxed_rule(form=DeltaForm(0.4), topk=4)
    rule.admit(0, request(THINKING))
    assert emitted(rule.accept(make_inputs(rows, [[2]]))) == [[2, 5]]


def test_logits_that_differ_below_the_softmax() -> None:
    """Two logits apart by less than float32 probabilities can tell: the larger is the argmax, whatever the ids."""
    logits = torch.tensor([[[0.0, 1e-9, -5.0], [0.0, 0.0, 9.0]]])
    probabilities = torch.softmax(logits, dim=-1)
    assert probabilities[0, 0, 0] == probabilities[0, 0, 1]
    assert draft_standing(logits[:, :1], torch.tensor([[0]])).rank.item() == 1
    rule = relaxed_rule(topk=1, form=DeltaForm(0.5), markers=ThinkingMarkers(8, 9))
    rule.admit(0, request((8,)))
    assert emitted(rule.accept(make_inputs(logits, [[0]]))) == [[1]]


def test_softmax_is_float32_of_the_raw_logits() -> None:
    """bf16 probabilities of .5 and .3 are equal to what the threshold needs only after rounding."""
    logits = torch.tensor([[[4.0, 3.0, 2.0, 1.0]]], dtype=torch.bfloat16)
    standing = draft_standing(logits, torch.tensor([[1]]))
    exact = torch.softmax(logits.double(), dim=-1)
    assert standing.probability.dtype == torch.float32
    assert standing.probability.item() == pytest.approx(exact[0, 0, 1].item(), abs=1e-7)
    assert standing.top.item() == pytest.approx(exact[0, 0, 0].item(), abs=1e-7)


@pytest.mark.parametrize("phase", ["token", "round"])
def test_thinking_tokens_add_up_over_rounds(phase: str) -> None:
    """Counted round by round on the device, and over the whole output on the host, they are the same."""
    rng = random.Random(3)
    generator = torch.Generator().manual_seed(3)
    num_slots, num_drafts = 5, 3
    rule = relaxed_rule(num_slots, phase=phase, form=DeltaForm(0.5))
    prompts = [[rng.randrange(8) for _ in range(4)] for _ in range(num_slots)]
    outputs: list[list[int]] = []
    for slot, prompt in enumerate(prompts):
        rule.admit(slot, request(prompt))
        outputs.append(first_token(rule, torch.randn(1, 8, generator=generator), slot, 4).tolist())
    counted = [sum(thinking_mask(p, o, MARKERS)) for p, o in zip(prompts, outputs, strict=True)]
    for _ in range(12):
        logits = torch.randn(num_slots, num_drafts + 1, 8, generator=generator)
        drafts = logits[:, :-1].topk(2, dim=-1).indices[..., rng.randrange(2)]
        verification = rule.accept(make_inputs(logits, drafts))
        for slot, tokens in enumerate(emitted(verification)):
            outputs[slot].extend(tokens)
            counted[slot] += int(verification.num_thinking[slot])
    assert counted == [sum(thinking_mask(p, o, MARKERS)) for p, o in zip(prompts, outputs, strict=True)]
    assert all(counted)
    assert all(0 < count < len(output) for count, output in zip(counted, outputs, strict=True))


def test_the_row_that_predicts_a_marker_has_the_phase_in_front_of_it() -> None:
    assert phase_before((1,), [2, BEGIN, 1, 3, END, 4], MARKERS) == [False, False, True, True, True, False]
    assert phase_before((BEGIN,), [1, BEGIN, END, 2], MARKERS) == [True, True, True, False]
    assert phase_before((1,), [], MARKERS) == []


def test_thinking_mask() -> None:
    def mask(prompt: Sequence[int], output: Sequence[int]) -> list[bool]:
        return thinking_mask(prompt, output, MARKERS)

    assert mask((BEGIN,), [1, 2, END, 3]) == [True, True, False, False]
    assert mask((1,), [BEGIN, 1, END, 2, BEGIN, 3]) == [False, True, False, False, False, True]
    assert mask((BEGIN, END), [1]) == [False]
    assert mask((BEGIN,), []) == []
