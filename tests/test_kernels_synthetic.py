"""Acceptance at set rates: the kernel against its reference and against the rule."""

from __future__ import annotations

import pytest
import torch

from spec_kernels.synthetic import synthetic_accept, synthetic_accept_reference
from spec_kernels.vocabulary import VOCAB_TILE
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.acceptance.synthetic import SyntheticAcceptance
from spec_lab.acceptance.triton_rules import TritonSyntheticAcceptance
from spec_lab.core.types import AcceptanceInputs
from tests.kernel_lab import DEVICE, randn
from tests.tiers import checkerboard

RATES = (0.9, 0.6, 0.2, 0.1)


def make_inputs(batch: int, num_drafts: int, vocab_size: int, offered: bool) -> AcceptanceInputs:
    """Requests of several slots and lengths, of which one is inactive."""
    rows = torch.arange(batch, device=DEVICE)
    logits = (2 * randn(batch, num_drafts + 1, vocab_size)).round()
    drafts = torch.arange(batch * (num_drafts + 1), device=DEVICE).view(batch, -1)[:, :num_drafts]
    num_offered = rows % (num_drafts + 1) if offered else None
    return AcceptanceInputs(logits, drafts, rows != 1, batch - rows, 3 * rows + 5, num_drafts=num_offered)


@pytest.mark.parametrize(("sizes", "offered"), checkerboard([(0, 9), (4, 40), (3, 2 * VOCAB_TILE + 7)], [True, False]))
def test_it_accepts_what_the_rule_does(sizes: tuple[int, int], offered: bool) -> None:
    """Thirty rounds, so that every number of accepted drafts comes up; rates reach further than the drafts do."""
    (num_drafts, vocab_size), batch = sizes, 30
    inputs = make_inputs(batch, num_drafts, vocab_size, offered)
    seeds = SlotSeeds(batch, 0, DEVICE)
    seeds.values.copy_(torch.arange(batch + 1) * 12345)
    expected = SyntheticAcceptance(RATES, seeds, DEVICE).accept(inputs)
    got = TritonSyntheticAcceptance(RATES, seeds, DEVICE).accept(inputs)
    assert torch.equal(got.num_emitted, expected.num_emitted) and torch.equal(got.tokens, expected.tokens)
    assert offered or set(got.num_emitted.tolist()) == {*range(num_drafts + 2)}
    rates = torch.tensor(RATES, dtype=torch.float64, device=DEVICE)
    results = []
    for function in (synthetic_accept, synthetic_accept_reference):
        tokens, num_emitted = torch.full_like(got.tokens, -7), torch.full_like(got.num_emitted, -7)
        parts = inputs.draft_tokens, rates, inputs.active, inputs.slot_ids, seeds.values, inputs.kv_lens
        function(tokens, num_emitted, inputs.logits, *parts, inputs.num_drafts)
        results.append((tokens, num_emitted))
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))
