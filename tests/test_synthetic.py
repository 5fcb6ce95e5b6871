"""Synthetic acceptance: the rates it was given, and nothing it might look at."""

from __future__ import annotations

import math

import pytest
import torch

from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.acceptance.rates import expand_mean_length
from spec_lab.acceptance.synthetic import SyntheticAcceptance
from tests.acceptance_cases import CPU, make_inputs, request


@pytest.mark.parametrize(
    ("mean_length", "num_draft_tokens", "rates"),
    [
        (2.5, 3, (1, 0.5, 0)),
        (2.6, 3, (1, 0.6, 0)),
        (1.0, 3, (0, 0, 0)),
        (4.0, 3, (1, 1, 1)),
        (1.25, 1, (0.25,)),
        (1.0, 0, ()),
        (3.0, 4, (1, 1, 0, 0)),
    ],
)
def test_mean_length_expands_as_in_vllm(mean_length: float, num_draft_tokens: int, rates: tuple[float, ...]) -> None:
    expanded = expand_mean_length(mean_length, num_draft_tokens)
    assert expanded == pytest.approx(rates)
    assert 1 + sum(expanded) == pytest.approx(mean_length)


def simulate(rates: tuple[float, ...], num_requests: int, num_rounds: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [num_rounds, num_requests] emitted, and the tokens of the last round, on rows nothing would be accepted
    in.
    """
    seeds = SlotSeeds(num_requests, 0, CPU)
    rule = SyntheticAcceptance(rates, seeds, CPU)
    for slot in range(num_requests):
        rule.admit(slot, request(request_id=str(slot)))
    logits = torch.zeros(num_requests, len(rates) + 1, 4)
    logits[..., 3] = 1
    drafts = torch.ones(num_requests, len(rates), dtype=torch.int64)
    kv_lens = torch.full((num_requests,), 5)
    rounds, tokens = [], torch.empty(0)
    for _ in range(num_rounds):
        verification = rule.accept(make_inputs(logits, drafts, kv_lens=kv_lens))
        rounds.append(verification.num_emitted)
        kv_lens = kv_lens + verification.num_emitted
        tokens = verification.tokens
    return torch.stack(rounds), tokens


def test_unconditional_rates_are_met() -> None:
    rates = (0.9, 0.5, 0.2, 0.0)
    num_emitted, tokens = simulate(rates, 200, 100)
    count = num_emitted.numel()
    for position, rate in enumerate(rates):
        measured = (num_emitted > position + 1).double().mean().item()
        assert abs(measured - rate) <= 5 * math.sqrt(rate * (1 - rate) / count), position
    for row, length in zip(tokens.tolist(), num_emitted[-1].tolist(), strict=True):
        assert row[:length] == [1] * (length - 1) + [3]


def test_a_whole_mean_length_is_met_every_round() -> None:
    num_emitted, _ = simulate(expand_mean_length(3.0, 4), 20, 10)
    assert (num_emitted == 3).all()


def test_requests_and_rounds_draw_apart() -> None:
    num_emitted, _ = simulate((0.5,), 100, 100)
    accepted = (num_emitted - 1).double()
    for one, other in ((accepted[:-1], accepted[1:]), (accepted[:, :-1], accepted[:, 1:])):
        correlation = torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1]
        assert abs(correlation) < 5 / math.sqrt(one.numel())
