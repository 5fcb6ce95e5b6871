"""This is what the tests of the acceptance rules share: rows of logits written as probabilities, a round's inputs with
defaults for what a test does not care about, and every rule by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from spec_lab.acceptance.distribution import SamplingParams
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.acceptance.phase import RoundPhase, ThinkingMarkers, TokenPhase
from spec_lab.acceptance.rates import expand_mean_length
from spec_lab.acceptance.rejection import METHODS, RejectionAcceptance
from spec_lab.acceptance.relaxed import DeltaForm, RatioForm, RelaxedThinkingAcceptance
from spec_lab.acceptance.strict import StrictAcceptance
from spec_lab.acceptance.synthetic import SyntheticAcceptance
from spec_lab.core.protocols import RuleTraits
from spec_lab.core.types import AcceptanceInputs, Request, Verification

CPU = torch.device("cpu")
MARKERS = ThinkingMarkers(begin=6, end=7)
Row = Mapping[int, float]


class Rule(Protocol):
    """The interface every rule has."""

    traits: RuleTraits

    def admit(self, slot: int, request: Request) -> None: ...

    def first_tokens(self, logits: torch.Tensor, slot_ids: torch.Tensor, kv_lens: torch.Tensor) -> torch.Tensor: ...

    def accept(self, inputs: AcceptanceInputs) -> Verification: ...


def request(prompt_ids: Sequence[int] = (0,), request_id: str = "r") -> Request:
    return Request(request_id, "test", tuple(prompt_ids), max_new_tokens=8)


def first_token(rule: Rule, logits: torch.Tensor, slot: int, kv_len: int) -> torch.Tensor:
    """The token [1] that a rule puts behind one prompt, from logits [1, vocab]."""
    return rule.first_tokens(logits, torch.tensor([slot]), torch.tensor([kv_len]))


def logits_of(rows: Sequence[Row], vocab_size: int = 8) -> torch.Tensor:
    """[rows, vocab] logits whose softmax has these probabilities."""
    logits = torch.full((len(rows), vocab_size), -math.inf)
    for index, row in enumerate(rows):
        for token, probability in row.items():
            logits[index, token] = math.log(probability)
    return logits


def peaked(tokens: Sequence[int], vocab_size: int = 8) -> torch.Tensor:
    """[rows, vocab] logits of a target certain of `tokens`."""
    return logits_of([{token: 1.0} for token in tokens], vocab_size)


def make_inputs(
    logits: torch.Tensor, draft_tokens: Sequence[Sequence[int]] | torch.Tensor, **given: Any
) -> AcceptanceInputs:
    """The inputs of a round from its logits [batch, N, vocab]; every row is active, in slots 0, 1, ..., at L = 10,
    unless given.
    """
    batch_size = logits.shape[0]
    drafts = torch.as_tensor(draft_tokens, dtype=torch.int64).reshape(batch_size, -1)
    defaults = {
        "active": torch.ones(batch_size, dtype=torch.bool),
        "slot_ids": torch.arange(batch_size),
        "kv_lens": torch.full((batch_size,), 10),
    }
    return AcceptanceInputs(logits, drafts, **(defaults | given))


def emitted(verification: Verification) -> list[list[int]]:
    """The emitted tokens of each row, without the junk behind them."""
    rows = zip(verification.tokens.tolist(), verification.num_emitted.tolist(), strict=True)
    return [tokens[:num_emitted] for tokens, num_emitted in rows]


def relaxed_rule(
    num_slots: int = 4,
    *,
    phase: str = "token",
    form: DeltaForm | RatioForm | None = None,
    topk: int = 3,
    markers: ThinkingMarkers = MARKERS,
    eos: Sequence[int] = (),
    prefill_chunk: int = 512,
    device: torch.device = CPU,
) -> RelaxedThinkingAcceptance:
    phases = {
        "token": lambda: TokenPhase(num_slots, markers, eos, device),
        "round": lambda: RoundPhase(num_slots, markers, prefill_chunk, device),
    }
    return RelaxedThinkingAcceptance(form or DeltaForm(0.25), topk, phases[phase]())


def rejection_rule(
    num_slots: int, method: str, sampling: SamplingParams, device: torch.device = CPU
) -> RejectionAcceptance:
    return RejectionAcceptance(METHODS[method], sampling, SlotSeeds(num_slots, 0, device))


SAMPLING = SamplingParams(temperature=0.7)
TRUNCATED = SamplingParams(temperature=1.3, top_k=3, top_p=0.8)
GREEDY = SamplingParams(temperature=0.0)
SMALL_MARKERS = ThinkingMarkers(begin=0, end=1)

RuleFactory = Callable[[int, int, torch.device], Rule]


def _relaxed(phase: str, form: DeltaForm | RatioForm, topk: int) -> RuleFactory:
    return lambda num_slots, num_drafts, device: relaxed_rule(
        num_slots, phase=phase, form=form, topk=topk, markers=SMALL_MARKERS, eos=(2,), device=device
    )


def _rejection(method: str, sampling: SamplingParams) -> RuleFactory:
    return lambda num_slots, num_drafts, device: rejection_rule(num_slots, method, sampling, device)


def _synthetic(num_slots: int, num_drafts: int, device: torch.device) -> SyntheticAcceptance:
    rates = expand_mean_length(1 + num_drafts * 0.45, num_drafts)
    return SyntheticAcceptance(rates, SlotSeeds(num_slots, 0, device), device)


GREEDY_RULES: Mapping[str, RuleFactory] = {
    "strict": lambda num_slots, num_drafts, device: StrictAcceptance(),
    "relaxed_token_delta": _relaxed("token", DeltaForm(0.3), 3),
    "relaxed_token_ratio": _relaxed("token", RatioForm(0.4), 2),
    "relaxed_round_delta": _relaxed("round", DeltaForm(0.3), 3),
    "relaxed_round_ratio": _relaxed("round", RatioForm(0.4), 2),
    "synthetic": _synthetic,
}
SAMPLING_RULES: Mapping[str, RuleFactory] = {
    f"{method}_{name}": _rejection(method, sampling)
    for method in METHODS
    for name, sampling in (("truncated", TRUNCATED), ("greedy", GREEDY))
}
RULES: Mapping[str, RuleFactory] = {**GREEDY_RULES, **SAMPLING_RULES}
