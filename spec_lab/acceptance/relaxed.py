"""Relaxed acceptance inside the thinking phase: lossy, for reasoning models (TensorRT-LLM blog 1, PR #3865).

A draft is accepted if it is the argmax. Inside thinking it is also accepted if its rank is below `topk` and its
probability is close enough to the largest one. `form=delta` (TensorRT-LLM) subtracts, so if delta exceeds the top
probability, every probability is close enough. `form=ratio` (vLLM #22238 and #43184, closed) multiplies. Probabilities
are the float32 softmax of the raw logits, without temperature.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_lab.acceptance.distribution import at_tokens
from spec_lab.acceptance.emit import emit, leading, only_offered
from spec_lab.acceptance.phase import RelaxationPhase
from spec_lab.acceptance.standing import DraftStanding, round_standing, stand
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op
from spec_lab.core.protocols import RuleTraits
from spec_lab.core.types import AcceptanceInputs, Request, Verification


@dataclass(frozen=True, slots=True)
class DeltaForm:
    """form=delta: accepts p >= p_top1 - delta."""

    delta: float

    def threshold(self, top: torch.Tensor) -> torch.Tensor:
        return top - self.delta


@dataclass(frozen=True, slots=True)
class RatioForm:
    """form=ratio: accepts p >= ratio * p_top1."""

    ratio: float

    def threshold(self, top: torch.Tensor) -> torch.Tensor:
        return top * self.ratio


RelaxedForm = DeltaForm | RatioForm
"""Maps a row's largest probability to the smallest one that is accepted."""


def relaxed_matches(standing: DraftStanding, topk: int, least: torch.Tensor) -> torch.Tensor:
    """Return for each draft [batch, K] whether it is the argmax, or has a rank below `topk` and a probability of at
    least `least` [batch, K]."""
    return standing.is_top | ((standing.rank < topk) & (standing.probability >= least))


class RelaxedThinkingAcceptance:
    """Emits the accepted drafts, then the target's argmax of the row reached."""

    traits = RuleTraits(lossless=False)

    def __init__(self, form: RelaxedForm, topk: int, phase: RelaxationPhase, kernels: KernelSet = TORCH_FORMS) -> None:
        assert topk >= 1, "the argmax is always a candidate"
        self._form = form
        self._topk = topk
        self._phase = phase
        self._stand = kernels.get(Op.DRAFT_STANDING, stand)

    def admit(self, slot: int, request: Request) -> None:
        self._phase.admit(slot, request.prompt_ids)

    def first_tokens(self, logits: torch.Tensor, slot_ids: torch.Tensor, kv_lens: torch.Tensor) -> torch.Tensor:
        tokens = logits.argmax(dim=-1)
        self._phase.advance(slot_ids, tokens.unsqueeze(1), torch.ones_like(tokens))
        return tokens

    def accept(self, inputs: AcceptanceInputs) -> Verification:
        slot_ids, drafts = inputs.slot_ids, inputs.draft_tokens
        standing, top_tokens = round_standing(inputs.logits, drafts, self._stand)
        num_accepted = leading(only_offered(self.matches(standing, slot_ids, drafts), inputs.num_drafts))
        last = at_tokens(top_tokens, num_accepted)
        emitted = emit(inputs, num_accepted, last)
        reached = torch.arange(drafts.shape[1], device=drafts.device) < (emitted.num_emitted - 1).unsqueeze(1)
        num_thinking = self._phase.thinking.count(slot_ids, emitted.tokens, emitted.num_emitted)
        self.advance(slot_ids, emitted.tokens, emitted.num_emitted)
        # Same dtype as the tokens: the host reads both in one tensor, and joining dtypes would take more launches.
        relaxed = (reached & ~standing.is_top).to(emitted.tokens.dtype)
        return Verification(emitted.tokens, emitted.num_emitted, relaxed, num_thinking)

    def matches(self, standing: DraftStanding, slot_ids: torch.Tensor, draft_tokens: torch.Tensor) -> torch.Tensor:
        relaxed = self._form.threshold(standing.top)
        least = self._phase.least(slot_ids, draft_tokens, standing.top, relaxed)
        return relaxed_matches(standing, self._topk, least)

    def advance(self, slot_ids: torch.Tensor, tokens: torch.Tensor, num_emitted: torch.Tensor) -> None:
        self._phase.advance(slot_ids, tokens, num_emitted)
