"""What an acceptance rule is given, what it says about itself, and how it states its result."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_lab.core.types import Verification


@dataclass(slots=True)
class AcceptanceInputs:
    """One verified round, a row a request; K = num_draft_tokens, N = K + 1.

    Attributes:
        logits: [batch, N, vocab] of the target; row j predicts the token after input j, so it judges draft j.
        draft_tokens: [batch, K] in target ids.
        active: [batch] bool; padded rows are False.
        slot_ids: [batch] slot of each row; padded rows have the scratch slot.
        kv_lens: [batch] L at the start of the round, the key of its noise.
        draft_logits: [batch, K, vocab] with q = softmax(draft_logits) the distribution each draft was really sampled
            from, temperature included, -inf outside the draft vocabulary; None for greedy drafts, whose q is one-hot.
    """

    logits: torch.Tensor
    draft_tokens: torch.Tensor
    active: torch.Tensor
    slot_ids: torch.Tensor
    kv_lens: torch.Tensor
    draft_logits: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class RuleTraits:
    """What a run needs to know of its rule.

    Attributes:
        lossless: the output follows the target's distribution (at temperature 0, its argmax).
        imposed: acceptance is set and not earned, so acceptance lengths and answers say nothing about the models.
        reads_draft_logits: the drafter has to sample, and to keep the logits of what it sampled from.
    """

    lossless: bool
    imposed: bool = False
    reads_draft_logits: bool = False


def leading(passed: torch.Tensor) -> torch.Tensor:
    """[batch, K] bool to [batch]: how many columns pass before the first that does not."""
    return passed.long().cumprod(dim=1).sum(dim=1)


def emit(inputs: AcceptanceInputs, num_accepted: torch.Tensor, last: torch.Tensor) -> Verification:
    """The accepted drafts and then `last`, the correction or bonus token; both arguments [batch]."""
    tokens = torch.cat((inputs.draft_tokens, last.unsqueeze(1)), dim=1)
    tokens = tokens.scatter(1, num_accepted.unsqueeze(1), last.unsqueeze(1))
    return Verification(tokens, torch.where(inputs.active, num_accepted + 1, 0))
