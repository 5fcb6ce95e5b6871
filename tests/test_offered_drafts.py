"""Rounds that offer fewer drafts than there is room for: what every rule does with the others, and that the law holds.

A request that offers k drafts must be judged as if it had drafted k. Which of its drafts it offers may follow from all
that is known before a draft is drawn, and from nothing else: by exact enumeration.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from spec_lab.acceptance.confidences import DraftConfidences
from spec_lab.acceptance.rejection import METHODS
from spec_lab.core.types import AcceptanceInputs, Request, Sequence
from spec_lab.engine.cost_plan import CostPlan
from spec_lab.engine.costs import CostTable
from spec_lab.engine.judged import ChainPositions
from spec_lab.engine.offered import DraftOffers
from tests.acceptance_cases import CPU, RULES, TRUNCATED, emitted, make_inputs, request
from tests.covering import each_value
from tests.test_rejection import (
    PLAIN,
    PROPOSALS,
    enumeration_error,
    make_models,
)

# Every rule.


def random_inputs(num_drafts: int, batch_size: int = 16, vocab_size: int = 6) -> AcceptanceInputs:
    """Rounds in which drafts are often accepted: they are drawn from distributions near the target's."""
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn((batch_size, num_drafts + 1, vocab_size), generator=generator)
    draft_logits = logits[:, :-1] + 0.5 * torch.randn((batch_size, num_drafts, vocab_size), generator=generator)
    drawn = torch.softmax(2 * draft_logits, dim=-1).flatten(0, 1).multinomial(1, generator=generator)
    return make_inputs(logits, drawn.view(batch_size, num_drafts), draft_logits=draft_logits)


@pytest.mark.parametrize("name", RULES)
def test_what_is_not_offered_is_as_if_it_had_not_been_drafted(name: str) -> None:
    """A batch in which rows offer 0 to 3 drafts, against rounds of a row each of so many drafts."""
    inputs, num_drafts = random_inputs(3), 3
    batch_size = len(inputs.active)
    offered = torch.arange(batch_size) % (num_drafts + 1)
    rules = [RULES[name](batch_size, num_drafts, CPU) for _ in range(2)]
    for rule in rules:
        for slot in range(batch_size):
            rule.admit(slot, request((0,), str(slot)))
    got = emitted(rules[0].accept(replace(inputs, num_drafts=offered)))
    assert inputs.draft_logits is not None
    for row, count in enumerate(offered.tolist()):
        short = make_inputs(
            inputs.logits[row : row + 1, : count + 1],
            inputs.draft_tokens[row : row + 1, :count],
            slot_ids=torch.tensor([row]),
            draft_logits=inputs.draft_logits[row : row + 1, :count],
        )
        assert [got[row]] == emitted(rules[1].accept(short))
    assert {len(tokens) - 1 for tokens in got} >= {0, 1, 2}
    assert any(len(tokens) - 1 == count > 0 for tokens, count in zip(got, offered.tolist(), strict=True))


def test_an_inactive_row_emits_nothing_whatever_it_offers() -> None:
    inputs = random_inputs(2, batch_size=3)
    inputs = replace(inputs, active=torch.tensor([True, False, True]), num_drafts=torch.tensor([0, 2, 1]))
    for name in ("strict", "synthetic", "block_truncated"):
        assert emitted(RULES[name](3, 2, CPU).accept(inputs))[1] == []


# The law, by enumeration.


def by_confidence(inputs: AcceptanceInputs) -> torch.Tensor:
    """Offer drafts up to that at which the product of the top-1 probabilities falls under .5."""
    assert inputs.draft_logits is not None
    survival = torch.softmax(inputs.draft_logits, -1).amax(-1).cumprod(dim=1)
    return 1 + (survival[:, :-1] >= 0.5).sum(dim=1)


def by_earlier_tokens(inputs: AcceptanceInputs) -> torch.Tensor:
    """Nothing to do with confidence: the second draft is offered behind some first drafts only."""
    return torch.where(inputs.draft_tokens[:, 0] % 2 == 0, inputs.draft_tokens.shape[1], 1)


def none_at_all(inputs: AcceptanceInputs) -> torch.Tensor:
    return torch.zeros_like(inputs.slot_ids)


def by_costs(inputs: AcceptanceInputs) -> torch.Tensor:
    """plan=cost, where every other row costs next to nothing: what stands behind a draft must not say if it is
    offered."""
    assert inputs.draft_logits is not None
    num_drafts = inputs.draft_tokens.shape[1]
    sequence = Sequence(Request("r", "x", (1,), 9), 0, [], 0.0, [1], num_waiting=num_drafts)
    plan, verified = (
        CostPlan(1, ChainPositions(num_drafts), reads_confidences=True),
        np.array([1.0, 1.02, 1.5, 1.52])[: num_drafts + 1],
    )
    plan.costs = CostTable(np.tile(verified, (2, 1)), np.ones(2), np.full(2, 0.01), timed={}, missed_size=32)
    plan.review([sequence])
    offered = []
    for survival in torch.softmax(inputs.draft_logits, -1).amax(-1).cumprod(dim=1).tolist():
        sequence.waiting_confidences = survival
        offered.append(plan.choose([sequence]).shape.num_offered)
    assert len(set(offered)) > 1 or num_drafts < 3
    return torch.tensor(offered)


CUTS = {cut.__name__: cut for cut in (by_confidence, by_earlier_tokens, by_costs, none_at_all)}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("proposal", ["zeros", "far", "other"])
@pytest.mark.parametrize("method", METHODS)
def test_two_rounds_that_offer_fewer_drafts_equal_the_target(method: str, proposal: str, cut: str) -> None:
    """Over a vocabulary of 4, all six tokens jointly; block verification too."""
    models = make_models(4, 2, PLAIN, proposal)
    assert enumeration_error(models, METHODS[method], PLAIN, CUTS[cut]) < 1e-12


@pytest.mark.parametrize(("method", "proposal", "cut"), each_value(METHODS, PROPOSALS, CUTS, times=2))
def test_three_drafts_of_which_fewer_are_offered_equal_the_target(method: str, proposal: str, cut: str) -> None:
    models = make_models(4, 3, TRUNCATED, proposal)
    assert enumeration_error(models, METHODS[method], TRUNCATED, CUTS[cut]) < 1e-12


# Who offers how many.


def test_survival_is_the_product_from_draft_1_on() -> None:
    confidences = DraftConfidences(2, 3, CPU)
    slots = torch.tensor([1, 0])
    for _ in range(2):  # a second round begins anew
        confidences.note(slots, torch.tensor([0.5, 0.25]))
        confidences.note(slots, torch.tensor([0.5, 1.0]), torch.tensor([1]))
        confidences.note(slots, torch.tensor([0.5, 0.5]), torch.tensor([2]))
        assert confidences.survival[slots].tolist() == [[0.5, 0.25, 0.125], [0.25, 0.25, 0.125]]


def test_a_request_offers_what_waits_in_its_slot_up_to_its_own_limit() -> None:
    slots, active = torch.tensor([1, 0, 2]), torch.tensor([True, True, False])
    offers = DraftOffers(2, 3, CPU)
    offers.expect(slots, 2)
    assert offers.of(slots, active, 3).tolist() == [2, 2, 0]
    offers.limits[0] = 1
    assert offers.of(slots, active, 3).tolist() == [2, 1, 0]
    assert offers.of(slots, active, 1).tolist() == [1, 1, 0]
    offers.expect(slots[:1], 0)
    assert offers.of(slots, active, 3).tolist() == [0, 1, 0]
