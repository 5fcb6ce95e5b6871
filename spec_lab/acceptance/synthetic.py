"""acceptance=synthetic: acceptance at set rates, to time a system at a chosen acceptance length (vLLM #38045, #40662).

The output is text of neither model, so its answers mean nothing; the target's logits are still read in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from spec_lab.acceptance.distribution import at_tokens
from spec_lab.acceptance.emit import emit
from spec_lab.acceptance.noise import SlotSeeds, Use, round_key, uniform
from spec_lab.core.protocols import RuleTraits
from spec_lab.core.types import AcceptanceInputs, Request, Verification


def expand_mean_length(mean_length: float, num_draft_tokens: int) -> tuple[float, ...]:
    """Unconditional rates of each position whose acceptance length varies least about `mean_length`.

    2.5 at K = 3 gives (1, .5, 0): one draft always, the second every other time, the third never.

    Raises:
        ValueError: a mean outside 1..K + 1.
    """
    if not 1 <= mean_length <= num_draft_tokens + 1:
        raise ValueError(
            f"acceptance.mean_length={mean_length} is outside 1..{num_draft_tokens + 1}, what "
            f"drafter.num_draft_tokens={num_draft_tokens} can emit a round; use acceptance.mean_length="
            f"{1 + num_draft_tokens / 2:g}"
        )
    return tuple(min(max(mean_length - 1 - position, 0.0), 1.0) for position in range(num_draft_tokens))


def check_rates(rates: Sequence[float], num_draft_tokens: int) -> None:
    """ValueError for what cannot be unconditional acceptance rates of K positions."""
    if len(rates) != num_draft_tokens:
        raise ValueError(
            f"acceptance.rates has {len(rates)} values for drafter.num_draft_tokens={num_draft_tokens}; "
            "give one a position"
        )
    if any(not 0 <= rate <= 1 for rate in rates):
        raise ValueError(f"acceptance.rates={list(rates)} are no probabilities; give values from 0 to 1")
    if any(later > earlier for earlier, later in pairwise(rates)):
        raise ValueError(
            f"acceptance.rates={list(rates)} grow, but a position is reached only past the one before it; "
            "give unconditional rates that do not increase"
        )


class SyntheticAcceptance:
    """Draft j is accepted with the unconditional rate j; then follows the target's argmax of the row reached.

    One draw a round decides: the rates do not increase, so the number of them above it has exactly these rates.
    """

    traits = RuleTraits(lossless=False, imposed=True)

    def __init__(self, rates: Sequence[float], seeds: SlotSeeds, device: torch.device) -> None:
        check_rates(rates, len(rates))
        self._rates = torch.tensor(rates, dtype=torch.float64, device=device)
        self._seeds = seeds

    def admit(self, slot: int, request: Request) -> None:
        self._seeds.admit(slot, request)

    def first_token(self, logits: torch.Tensor, slot: int, position: int) -> torch.Tensor:
        return logits.argmax(dim=-1)

    def accept(self, inputs: AcceptanceInputs) -> Verification:
        top_tokens = inputs.logits.argmax(dim=-1)
        seeds = self._seeds.of(inputs.slot_ids)
        draws = uniform(round_key(seeds, inputs.kv_lens, 0, Use.SYNTHETIC))
        num_accepted = (draws.unsqueeze(1) < self._rates).sum(dim=1)
        return emit(inputs, num_accepted, at_tokens(top_tokens, num_accepted))
