"""Strict greedy acceptance: the longest prefix of drafts that equal the target's argmax, plus one token."""

from __future__ import annotations

import torch

from spec_lab.acceptance.emit import leading, only_offered
from spec_lab.acceptance.standing import DraftStanding
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op
from spec_lab.core.protocols import RuleTraits
from spec_lab.core.types import AcceptanceInputs, Request, Verification


def strict_accept(
    logits: torch.Tensor, draft_tokens: torch.Tensor, active: torch.Tensor, num_drafts: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the argmax of each row, tokens [batch, N], and n [batch].

    n is 1 plus the number of leading drafts that are offered and equal the argmax; 0 for inactive requests.
    `num_drafts` [batch] is the number of drafts that each request offers; None for all.
    """
    tokens = logits.argmax(dim=-1)
    num_accepted = leading(only_offered(tokens[:, :-1] == draft_tokens, num_drafts))
    return tokens, torch.where(active, num_accepted + 1, 0)


class StrictAcceptance:
    """Accepts the leading offered drafts that equal the argmax. Row j judges the draft that is the input of row j + 1.

    With m accepted drafts it emits the argmax of rows 0..m, so n = m + 1. In the rows before m the argmax *is* the
    draft. Row m gives the correction, or the bonus token after the last draft. Ties go to the lowest token id.
    """

    traits = RuleTraits(lossless=True)

    def __init__(self, kernels: KernelSet = TORCH_FORMS) -> None:
        self._accept = kernels.get(Op.STRICT_ACCEPT, strict_accept)

    def admit(self, slot: int, request: Request) -> None:
        """Do nothing: the rule has no state."""

    def first_tokens(self, logits: torch.Tensor, slot_ids: torch.Tensor, kv_lens: torch.Tensor) -> torch.Tensor:
        return logits.argmax(dim=-1)

    def accept(self, inputs: AcceptanceInputs) -> Verification:
        tokens, num_emitted = self._accept(inputs.logits, inputs.draft_tokens, inputs.active, inputs.num_drafts)
        return Verification(tokens, num_emitted)

    def matches(self, standing: DraftStanding, slot_ids: torch.Tensor, draft_tokens: torch.Tensor) -> torch.Tensor:
        return standing.is_top

    def advance(self, slot_ids: torch.Tensor, tokens: torch.Tensor, num_emitted: torch.Tensor) -> None:
        """Do nothing: the rule has no state."""
