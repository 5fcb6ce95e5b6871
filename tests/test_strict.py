"""Strict acceptance against its definition, row by row."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_lab.acceptance.strict import StrictAcceptance
from spec_lab.core.types import AcceptanceInputs

VOCAB = 5


def accept(logits: torch.Tensor, drafts: torch.Tensor, active: torch.Tensor) -> tuple[list[list[int]], list[int]]:
    """Return the emitted tokens of each row."""
    slots = torch.arange(len(active))
    verification = StrictAcceptance().accept(AcceptanceInputs(logits, drafts, active, slots, torch.zeros_like(slots)))
    num_emitted = verification.num_emitted.tolist()
    rows = zip(verification.tokens.tolist(), num_emitted, strict=True)
    return [tokens[:n] for tokens, n in rows], num_emitted


def expected(logits: list[list[float]], drafts: list[int]) -> list[int]:
    """Decode on, slowly, while the draft is what the target says; ties go to the lowest id."""
    emitted = []
    for row, scores in enumerate(logits):
        emitted.append(scores.index(max(scores)))
        if row == len(drafts) or drafts[row] != emitted[-1]:
            break
    return emitted


@st.composite
def rounds(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw rounds of few distinct logits, so that ties and matches are common."""
    batch, num_drafts = draw(st.integers(1, 5)), draw(st.integers(0, 4))
    cells = st.integers(0, 2).map(float)
    size = batch * (num_drafts + 1) * VOCAB
    logits = torch.tensor(draw(st.lists(cells, min_size=size, max_size=size))).view(batch, num_drafts + 1, VOCAB)
    size = batch * num_drafts
    drafts = draw(st.lists(st.integers(0, VOCAB - 1), min_size=size, max_size=size))
    active = draw(st.lists(st.booleans(), min_size=batch, max_size=batch))
    return logits, torch.tensor(drafts, dtype=torch.int64).view(batch, num_drafts), torch.tensor(active)


@given(rounds())
def test_emits_the_longest_matching_prefix_plus_one(case: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    logits, drafts, active = case
    emitted, num_emitted = accept(logits, drafts, active)
    for row, (tokens, n) in enumerate(zip(emitted, num_emitted, strict=True)):
        if not active[row]:
            assert n == 0, "inactive rows emit 0, or their L grows"
            continue
        assert 1 <= n <= logits.shape[1]
        assert tokens == expected(logits[row].tolist(), drafts[row].tolist())
        assert tokens[:-1] == drafts[row, : n - 1].tolist(), "all but the last are the drafts"


def test_ties_go_to_the_lowest_index() -> None:
    """`torch.topk` gives any of them; so could an argmax over a wide vocabulary."""
    logits = torch.zeros(1, 3, 4001)
    logits[0, 0, [3000, 900, 7]] = 1.0
    logits[0, 1, [4000, 3999]] = 1.0
    emitted, _ = accept(logits, torch.tensor([[7, 3999]]), torch.tensor([True]))
    assert emitted == [[7, 3999, 0]]
    half = logits.bfloat16() + 1e-4
    assert accept(half, torch.tensor([[7, 3999]]), torch.tensor([True]))[0] == [[7, 3999, 0]]
