"""acceptance=rejection: lossless sampling, with three methods.

Temperature, top-k and top-p are applied to the target first, so the output follows the processed distribution. At
temperature 0 that is one-hot, and every method becomes strict greedy acceptance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from spec_kernels.noise_reference import Use, race, round_key, uniform
from spec_lab.acceptance.block import block_decision, longest
from spec_lab.acceptance.distribution import SamplingParams, law_of, one_hot, probabilities, truncated
from spec_lab.acceptance.emit import emit, leading, only_offered
from spec_lab.acceptance.noise import NoiseKey, SlotSeeds
from spec_lab.acceptance.tokenwise import Decision, residual_after, tokenwise_decision
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op
from spec_lab.core.protocols import RuleTraits
from spec_lab.core.types import AcceptanceInputs, Request, Verification


def sampled_proposal(inputs: AcceptanceInputs) -> torch.Tensor:
    """Return q [batch, K, vocab] of drafts that were sampled."""
    assert inputs.draft_logits is not None, "this method reads the drafter's logits"
    dtype = torch.promote_types(inputs.draft_logits.dtype, torch.float32)
    return torch.softmax(inputs.draft_logits, dim=-1, dtype=dtype)


def one_hot_proposal(inputs: AcceptanceInputs) -> torch.Tensor:
    """Return a one-hot q [batch, K, vocab]: each draft has probability 1."""
    dtype = torch.promote_types(inputs.logits.dtype, torch.float32)
    return one_hot(inputs.draft_tokens, inputs.logits.shape[-1], dtype)


@dataclass(frozen=True, slots=True)
class RejectionMethod:
    """A method of verification.

    Attributes:
        proposal: the probabilities q [batch, K, vocab] of the drafts.
        decide: thresholds and scales from p, q and the drafts.
        num_accepted: turns passed tests [batch, K] into the number of accepted drafts [batch].
        reads_draft_logits: whether `proposal` reads the drafter's logits.
    """

    proposal: Callable[[AcceptanceInputs], torch.Tensor]
    decide: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Decision]
    num_accepted: Callable[[torch.Tensor], torch.Tensor]
    reads_draft_logits: bool


METHODS: Mapping[str, RejectionMethod] = {
    "standard": RejectionMethod(sampled_proposal, tokenwise_decision, leading, reads_draft_logits=True),
    "one_hot": RejectionMethod(one_hot_proposal, tokenwise_decision, leading, reads_draft_logits=False),
    "block": RejectionMethod(sampled_proposal, block_decision, longest, reads_draft_logits=True),
}


def offered_proposal(method: RejectionMethod, inputs: AcceptanceInputs) -> torch.Tensor:
    """Return the method's q, set to 0 in the rows of drafts that are not offered.

    Nothing was proposed there, so the residual of such a row is the target's distribution. In block verification the
    last offered draft then has the threshold P_i, like the last draft K.
    """
    q, offered = method.proposal(inputs), inputs.offered
    return q if offered is None else torch.where(offered.unsqueeze(-1), q, 0)


def rejection_sample(
    method: RejectionMethod,
    key: NoiseKey,
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor | None,
    active: torch.Tensor,
    slot_ids: torch.Tensor,
    slot_seeds: torch.Tensor,
    kv_lens: torch.Tensor,
    temperature: float | None,
    num_drafts: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept drafts by p and q, and draw the token after them from the residual. Return tokens [batch, N], and n
    [batch].

    `slot_seeds` is [num_slots + 1], and `temperature` is as in `law_of`. The other tensors are those of
    `AcceptanceInputs`.
    """
    inputs = AcceptanceInputs(
        logits, draft_tokens, active, slot_ids, kv_lens=kv_lens, draft_logits=draft_logits, num_drafts=num_drafts
    )
    seeds = slot_seeds.index_select(0, slot_ids)
    p, q = law_of(logits, temperature), offered_proposal(method, inputs)
    decision = method.decide(p, q, draft_tokens)
    rows = torch.arange(draft_tokens.shape[1], device=seeds.device)
    draws = uniform(key(seeds.unsqueeze(1), kv_lens.unsqueeze(1), rows, Use.ACCEPT))
    num_accepted = method.num_accepted(only_offered(draws < decision.thresholds, num_drafts))
    weights = residual_after(p, q, decision.scales, num_accepted)
    emitted = emit(inputs, num_accepted, race(weights, key(seeds, kv_lens, num_accepted, Use.EMIT)))
    return emitted.tokens, emitted.num_emitted


class RejectionAcceptance:
    """Accepts drafts by comparing p with q, and draws the last token from the residual."""

    def __init__(
        self,
        method: RejectionMethod,
        sampling: SamplingParams,
        seeds: SlotSeeds,
        key: NoiseKey = round_key,
        kernels: KernelSet = TORCH_FORMS,
    ) -> None:
        """Choose the method, the sampling parameters and the noise.

        Args:
            key: makes the key of a draw. Tests and demonstrations pass others than `round_key`, to show the errors that
                these cause.
        """
        self.traits = RuleTraits(lossless=True, reads_draft_logits=method.reads_draft_logits)
        self._method = method
        self._sampling = sampling
        self._seeds = seeds
        self._key = key
        form = partial(rejection_sample, method, key)
        self._sample = kernels.get(Op.REJECTION_SAMPLE, form)
        assert self._sample is form or method.decide is tokenwise_decision, "block verification has no kernel"

    def admit(self, slot: int, request: Request) -> None:
        self._seeds.admit(slot, request)

    def first_tokens(self, logits: torch.Tensor, slot_ids: torch.Tensor, kv_lens: torch.Tensor) -> torch.Tensor:
        keys = self._key(self._seeds.of(slot_ids), kv_lens, 0, Use.PROMPT)
        return race(probabilities(logits, self._sampling), keys)

    def accept(self, inputs: AcceptanceInputs) -> Verification:
        logits, temperature = truncated(inputs.logits, self._sampling)
        tokens, num_emitted = self._sample(
            logits,
            inputs.draft_tokens,
            inputs.draft_logits if self._method.reads_draft_logits else None,
            inputs.active,
            inputs.slot_ids,
            self._seeds.values,
            inputs.kv_lens,
            temperature,
            inputs.num_drafts,
        )
        return Verification(tokens, num_emitted)
