"""Strict greedy acceptance takes the longest prefix of drafts equal to the target's argmax, plus one token."""

from __future__ import annotations

import torch

from spec_lab.acceptance.emit import leading, offered_alone
from spec_lab.acceptance.standing import DraftStanding
from spec_lab.core.protocols import RuleTraits
from spec_lab.core.types import AcceptanceInputs, Request, Verification
from spec_lab.operators.kernel_set import TORCH_FORMS, KernelSet, Op


def strict_accept(
    logits: torch.Tensor, draft_tokens: torch.Tensor, active: torch.Tensor, num_drafts: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the argmax of each row, and as many drafts as are equal to it: tokens [batch, N], how many count [batch].

    `num_drafts` [batch] says how many drafts each request offers; None is all.
    """
    tokens = logits.argmax(dim=-1)
    num_accepted = leading(offered_alone(tokens[:, :-1] == draft_tokens, num_drafts))
    return tokens, torch.where(active, num_accepted + 1, 0)


class StrictAcceptance:
    """Row j of the target predicts the token after input j, so draft j is right when argmax of row j equals it.

    m = number of leading matches; emitted = argmax of rows 0..m, n = m + 1: for the accepted rows the argmax *is* the
    draft, and row m gives the correction, or the bonus token when m = K. Ties go to the lowest token id.
    """

    traits = RuleTraits(lossless=True)

    def __init__(self, kernels: KernelSet = TORCH_FORMS) -> None:
        self._accept = kernels.get(Op.STRICT_ACCEPT, strict_accept)

    def admit(self, slot: int, request: Request) -> None:
        """The rule has no state to clear."""

    def first_tokens(self, logits: torch.Tensor, slot_ids: torch.Tensor, kv_lens: torch.Tensor) -> torch.Tensor:
        return logits.argmax(dim=-1)

    def accept(self, inputs: AcceptanceInputs) -> Verification:
        tokens, num_emitted = self._accept(inputs.logits, inputs.draft_tokens, inputs.active, inputs.num_drafts)
        return Verification(tokens, num_emitted)

    def matches(self, standing: DraftStanding, slot_ids: torch.Tensor, draft_tokens: torch.Tensor) -> torch.Tensor:
        return standing.is_top

    def advance(self, slot_ids: torch.Tensor, tokens: torch.Tensor, num_emitted: torch.Tensor) -> None:
        """The rule has no state to move on."""
