"""acceptance=synthetic: accepts at given rates, to time a system at a chosen acceptance length (vLLM #38045, #40662).

The output is neither model's text, so its answers mean nothing. The target's logits are still read in full. An EOS only
ends a request if it is the target's own token. An EOS among the accepted drafts does not: prompt lookup, for example,
fills its drafts up with token 0, which may be an EOS.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spec_kernels.noise_reference import Use, round_key, uniform
from spec_lab.acceptance.distribution import at_tokens
from spec_lab.acceptance.emit import append, only_offered
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.acceptance.rates import check_rates
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op
from spec_lab.core.protocols import RuleTraits
from spec_lab.core.types import AcceptanceInputs, Request, Verification


def synthetic_accept(
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    rates: torch.Tensor,
    active: torch.Tensor,
    slot_ids: torch.Tensor,
    slot_seeds: torch.Tensor,
    kv_lens: torch.Tensor,
    num_drafts: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make one random draw for each round. Accept as many drafts as there are rates above it, but no more than are
    offered.

    Then emit the argmax of the row reached. `rates` has K entries, or more, of which the first K are read. Return
    tokens [batch, N], and n [batch].
    """
    top_tokens = logits.argmax(dim=-1)
    draws = round_draws(slot_ids, slot_seeds, kv_lens)
    passed = draws.unsqueeze(1) < rates[: draft_tokens.shape[1]]
    num_accepted = only_offered(passed, num_drafts).sum(dim=1)
    tokens = append(draft_tokens, num_accepted, at_tokens(top_tokens, num_accepted))
    return tokens, torch.where(active, num_accepted + 1, 0)


def round_draws(slot_ids: torch.Tensor, slot_seeds: torch.Tensor, kv_lens: torch.Tensor) -> torch.Tensor:
    """Return the random draws [batch] that decide a round of `slot_ids` [batch] at `kv_lens` [batch]."""
    return uniform(round_key(slot_seeds.index_select(0, slot_ids), kv_lens, 0, Use.SYNTHETIC))


class SyntheticAcceptance:
    """Accepts draft j with the unconditional rate j, then emits the target's argmax of the row reached.

    One random draw decides a round: as many drafts are accepted as there are rates above it. The rates do not increase,
    so each offered draft is accepted with exactly its rate.
    """

    traits = RuleTraits(lossless=False, imposed=True)

    def __init__(
        self, rates: Sequence[float], seeds: SlotSeeds, device: torch.device, kernels: KernelSet = TORCH_FORMS
    ) -> None:
        check_rates(rates, len(rates))
        self._rates = torch.tensor(rates, dtype=torch.float64, device=device)
        self._seeds = seeds
        self._accept = kernels.get(Op.SYNTHETIC_ACCEPT, synthetic_accept)

    def admit(self, slot: int, request: Request) -> None:
        self._seeds.admit(slot, request)

    def first_tokens(self, logits: torch.Tensor, slot_ids: torch.Tensor, kv_lens: torch.Tensor) -> torch.Tensor:
        return logits.argmax(dim=-1)

    def accept(self, inputs: AcceptanceInputs) -> Verification:
        tokens, num_emitted = self._accept(
            inputs.logits,
            inputs.draft_tokens,
            self._rates,
            inputs.active,
            inputs.slot_ids,
            self._seeds.values,
            inputs.kv_lens,
            inputs.num_drafts,
        )
        return Verification(tokens, num_emitted)
