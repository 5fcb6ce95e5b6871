"""What holds for every acceptance rule, on small rows full of ties."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_lab.acceptance.distribution import probabilities
from spec_lab.acceptance.relaxed import DeltaForm, RatioForm
from spec_lab.acceptance.strict import StrictAcceptance
from spec_lab.core.types import AcceptanceInputs
from spec_lab.engine.capture import CudaGraphRecorder
from spec_lab.engine.tape import TapeRecorder
from tests.acceptance_cases import (
    CPU,
    GREEDY_RULES,
    RULES,
    SAMPLING_RULES,
    SMALL_MARKERS,
    TRUNCATED,
    Rule,
    emitted,
    relaxed_rule,
    request,
)

NUM_SLOTS = 6
PROMPTS = ((3,), (SMALL_MARKERS.begin, 3), (SMALL_MARKERS.begin, SMALL_MARKERS.end, 3), (3, 4), (0, 0), (1, 0))


@st.composite
def rounds(draw: st.DrawFn) -> AcceptanceInputs:
    """Draw rounds of up to five rows: logits from a few values, drafts that are often the argmax, some rows
    inactive.
    """
    batch_size, num_drafts = draw(st.integers(1, 5)), draw(st.integers(0, 4))
    vocab_size = draw(st.integers(3, 6))

    def integers(shape: tuple[int, ...], low: int, high: int) -> torch.Tensor:
        size = torch.Size(shape).numel()
        values = draw(st.binary(min_size=size, max_size=size))  # much faster to draw than a list of integers
        return low + torch.tensor(list(values), dtype=torch.int64).view(shape) % (high - low + 1)

    logits = integers((batch_size, num_drafts + 1, vocab_size), -2, 3).float()
    any_token = integers((batch_size, num_drafts), 0, vocab_size - 1)
    is_top = integers((batch_size, num_drafts), 0, 2) > 0
    drafts = torch.where(is_top, logits[:, :-1].argmax(dim=-1), any_token)
    draft_logits = integers((batch_size, num_drafts, vocab_size), -2, 2).float()
    active = integers((batch_size,), 0, 4) > 0
    slots = torch.tensor(draw(st.permutations(range(NUM_SLOTS))))[:batch_size]
    return AcceptanceInputs(
        logits=logits,
        draft_tokens=drafts,
        active=active,
        slot_ids=torch.where(active, slots, NUM_SLOTS),
        kv_lens=integers((batch_size,), 1, 1000),
        draft_logits=draft_logits,
        num_drafts=draw(st.none() | st.just(integers((batch_size,), 0, num_drafts))),
    )


def admitted(name: str, num_drafts: int, slots: list[int] | None = None, device: torch.device = CPU) -> Rule:
    """Admit request i to a rule in slot `slots[i]`."""
    rule = RULES[name](NUM_SLOTS, num_drafts, device)
    for index, slot in enumerate(slots or range(NUM_SLOTS)):
        rule.admit(slot, request(PROMPTS[index % len(PROMPTS)], request_id=str(index)))
    return rule


def num_drafts_of(inputs: AcceptanceInputs) -> int:
    return inputs.draft_tokens.shape[1]


def rows(inputs: AcceptanceInputs, index: torch.Tensor) -> AcceptanceInputs:
    values = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs)}
    return AcceptanceInputs(**{name: None if value is None else value[index] for name, value in values.items()})


@pytest.mark.parametrize("name", RULES)
@given(inputs=rounds())
@settings(max_examples=25)
def test_shape_and_prefix(name: str, inputs: AcceptanceInputs) -> None:
    """n in 1..N on active rows and 0 else; what is emitted is the drafts and one more token."""
    batch_size, num_rows, vocab_size = inputs.logits.shape
    verification = admitted(name, num_rows - 1).accept(inputs)
    assert verification.tokens.shape == (batch_size, num_rows)
    assert verification.tokens.dtype == verification.num_emitted.dtype == torch.int64
    for b, tokens in enumerate(emitted(verification)):
        if not inputs.active[b]:
            assert tokens == []
            continue
        assert 1 <= len(tokens) <= num_rows
        assert tokens[:-1] == inputs.draft_tokens[b, : len(tokens) - 1].tolist()
        assert 0 <= tokens[-1] < vocab_size
    assert ((verification.tokens >= 0) & (verification.tokens < vocab_size)).all(), "the drafter reads the junk too"


@pytest.mark.parametrize("name", GREEDY_RULES)
@given(inputs=rounds())
@settings(max_examples=25)
def test_greedy_rules_end_with_the_argmax(name: str, inputs: AcceptanceInputs) -> None:
    top = inputs.logits.argmax(dim=-1)
    for b, tokens in enumerate(emitted(admitted(name, num_drafts_of(inputs)).accept(inputs))):
        assert tokens[-1:] == top[b, : len(tokens)][-1:].tolist()


@pytest.mark.parametrize("name", [name for name in SAMPLING_RULES if name.endswith("truncated")])
@given(inputs=rounds())
@settings(max_examples=25)
def test_sampling_rules_emit_only_what_the_target_could(name: str, inputs: AcceptanceInputs) -> None:
    """No token outside the target's top-k and top-p is accepted or drawn."""
    possible = probabilities(inputs.logits, TRUNCATED) > 0
    for b, tokens in enumerate(emitted(admitted(name, num_drafts_of(inputs)).accept(inputs))):
        assert all(possible[b, j, token] for j, token in enumerate(tokens))


@pytest.mark.parametrize("name", [name for name in SAMPLING_RULES if name.endswith("greedy")])
@given(inputs=rounds())
@settings(max_examples=25)
def test_rejection_at_temperature_0_is_strict(name: str, inputs: AcceptanceInputs) -> None:
    verification = admitted(name, num_drafts_of(inputs)).accept(inputs)
    assert emitted(verification) == emitted(StrictAcceptance().accept(inputs))


@pytest.mark.parametrize("name", [name for name in RULES if name.startswith("relaxed")])
@given(inputs=rounds())
@settings(max_examples=25)
def test_relaxed_accepts_no_less_than_strict(name: str, inputs: AcceptanceInputs) -> None:
    verification = admitted(name, num_drafts_of(inputs)).accept(inputs)
    strict = StrictAcceptance().accept(inputs)
    assert (verification.num_emitted >= strict.num_emitted).all()


@pytest.mark.parametrize("phase", ["token", "round"])
@pytest.mark.parametrize("form", [DeltaForm(0.9), RatioForm(0.1)], ids=["delta", "ratio"])
@given(inputs=rounds())
@settings(max_examples=25)
def test_relaxed_with_topk_1_is_strict(phase: str, form: Any, inputs: AcceptanceInputs) -> None:
    rule = relaxed_rule(NUM_SLOTS, phase=phase, form=form, topk=1, markers=SMALL_MARKERS, eos=(2,))
    for slot in range(NUM_SLOTS):
        rule.admit(slot, request((SMALL_MARKERS.begin,)))
    verification = rule.accept(inputs)
    assert emitted(verification) == emitted(StrictAcceptance().accept(inputs))
    assert not verification.relaxed.any()


@pytest.mark.parametrize("name", RULES)
@given(inputs=rounds(), data=st.data())
@settings(max_examples=12)
def test_batch_order_slots_and_neighbours_do_not_matter(
    name: str, inputs: AcceptanceInputs, data: st.DataObject
) -> None:
    """In two rounds, permuted rows, every request in another slot, and a request alone give the same tokens."""
    num_drafts, batch_size = num_drafts_of(inputs), inputs.logits.shape[0]
    order = torch.tensor(data.draw(st.permutations(range(batch_size))))
    slots = data.draw(st.permutations(range(NUM_SLOTS)))
    moved = rows(inputs, order)
    moved.slot_ids = torch.tensor([*slots, NUM_SLOTS])[moved.slot_ids]
    here, there = admitted(name, num_drafts), admitted(name, num_drafts, slots)
    alone, b = admitted(name, num_drafts), data.draw(st.integers(0, batch_size - 1))
    for _ in range(2):
        expected = emitted(here.accept(inputs))
        assert emitted(there.accept(moved)) == [expected[i] for i in order.tolist()]
        assert emitted(alone.accept(rows(inputs, torch.tensor([b])))) == [expected[b]]
        inputs.kv_lens, moved.kv_lens = inputs.kv_lens + num_drafts + 1, moved.kv_lens + num_drafts + 1


@pytest.mark.parametrize("name", RULES)
@given(inputs=rounds())
@settings(max_examples=15)
def test_padded_rows_leave_no_trace(name: str, inputs: AcceptanceInputs) -> None:
    """A round of NaN on padded rows stands between two others: requests go on as if it had not been."""
    num_drafts = num_drafts_of(inputs)
    padded = rows(inputs, torch.arange(inputs.logits.shape[0]))
    padded.active, padded.slot_ids = torch.zeros_like(inputs.active), torch.full_like(inputs.slot_ids, NUM_SLOTS)
    padded.logits = torch.full_like(inputs.logits, torch.nan)
    disturbed, undisturbed = admitted(name, num_drafts), admitted(name, num_drafts)
    for rule in (disturbed, undisturbed):
        rule.accept(inputs)
    assert emitted(disturbed.accept(padded)) == [[]] * inputs.logits.shape[0]
    assert emitted(disturbed.accept(inputs)) == emitted(undisturbed.accept(inputs))


@pytest.mark.parametrize("name", RULES)
def test_a_readmitted_request_starts_over(name: str) -> None:
    """The same request in a slot that another one has used gives the same output."""
    inputs = random_round(num_rows=3)
    fresh, used = admitted(name, 2), admitted(name, 2, slots=[5, 4, 3, 2, 1, 0])
    for _ in range(3):
        used.accept(inputs)
    for index in range(NUM_SLOTS):
        used.admit(index, request(PROMPTS[index % len(PROMPTS)], request_id=str(index)))
    assert emitted(used.accept(inputs)) == emitted(fresh.accept(inputs))


def random_round(num_rows: int, vocab_size: int = 50, seed: int = 0, device: torch.device = CPU) -> AcceptanceInputs:
    """A round of six requests, of which the last row is padded."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(NUM_SLOTS, num_rows, vocab_size, generator=generator)
    draft_logits = logits[:, :-1] + torch.randn(NUM_SLOTS, num_rows - 1, vocab_size, generator=generator)
    slots = torch.tensor([3, 0, 5, 1, 2, NUM_SLOTS])
    return AcceptanceInputs(
        logits=logits.to(device),
        draft_tokens=draft_logits.argmax(dim=-1).to(device),
        active=(slots != NUM_SLOTS).to(device),
        slot_ids=slots.to(device),
        kv_lens=torch.randint(1, 100, (NUM_SLOTS,), generator=generator).to(device),
        draft_logits=draft_logits.to(device),
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", RULES)
def test_captured_rounds_equal_eager_ones_on_the_cpu(name: str, device: str) -> None:
    """One captured round replayed over three others, state carried along. The rows are random, so nothing in them is so
    close that the rounding of another device flips it."""
    here, there = admitted(name, 3), admitted(name, 3, device=torch.device(device))
    held = random_round(num_rows=4, device=torch.device(device))
    held.slot_ids.fill_(NUM_SLOTS)
    held.active.fill_(False)
    recorder = TapeRecorder() if device == "cpu" else CudaGraphRecorder(torch.device("cuda", 0))
    graph = recorder.capture(lambda: there.accept(held))
    for seed in range(1, 4):
        inputs = random_round(num_rows=4, seed=seed)
        for field in dataclasses.fields(inputs):
            if (tensor := getattr(inputs, field.name)) is not None:
                getattr(held, field.name).copy_(tensor)
        graph.replay()
        assert emitted(graph.outputs) == emitted(here.accept(inputs)), seed
