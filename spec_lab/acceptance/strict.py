"""Strict greedy acceptance takes the longest prefix of drafts equal to the target's argmax, plus one token."""

from __future__ import annotations

from typing import Protocol

import torch

from spec_lab.acceptance.emit import leading, only_offered
from spec_lab.acceptance.standing import DraftStanding
from spec_lab.core.protocols import RuleTraits
from spec_lab.core.types import AcceptanceInputs, Request, Verification


class StrictAcceptance:
    """Row j of the target predicts the token after input j, so draft j is right when argmax of row j equals it.

    m = number of leading matches; emitted = argmax of rows 0..m, n = m + 1: for the accepted rows the argmax *is* the
    draft, and row m gives the correction, or the bonus token when m = K. Ties go to the lowest token id.
    """

    traits = RuleTraits(lossless=True)

    def admit(self, slot: int, request: Request) -> None:
        """The rule has no state to clear."""

    def first_tokens(self, logits: torch.Tensor, slot_ids: torch.Tensor, kv_lens: torch.Tensor) -> torch.Tensor:
        return logits.argmax(dim=-1)

    def accept(self, inputs: AcceptanceInputs) -> Verification:
        tokens = inputs.logits.argmax(dim=-1)
        num_accepted = leading(only_offered(inputs, tokens[:, :-1] == inputs.draft_tokens))
        return Verification(tokens, torch.where(inputs.active, num_accepted + 1, 0))

    def matches(self, standing: DraftStanding, slot_ids: torch.Tensor, draft_tokens: torch.Tensor) -> torch.Tensor:
        return standing.is_top

    def advance(self, slot_ids: torch.Tensor, tokens: torch.Tensor, num_emitted: torch.Tensor) -> None:
        """The rule has no state to move on."""


class StrictKernel(Protocol):
    """Is `spec_kernels.strict.strict_accept`, or what computes the same."""

    def __call__(
        self,
        tokens: torch.Tensor,
        num_emitted: torch.Tensor,
        logits: torch.Tensor,
        draft_tokens: torch.Tensor,
        active: torch.Tensor,
        num_drafts: torch.Tensor | None = None,
    ) -> None: ...


def verify_by(kernel: StrictKernel, inputs: AcceptanceInputs) -> Verification:
    """Give what `StrictAcceptance.accept` gives, in one kernel."""
    tokens = torch.empty(inputs.logits.shape[:2], dtype=torch.int64, device=inputs.logits.device)
    num_emitted = torch.empty_like(tokens[:, 0])
    kernel(tokens, num_emitted, inputs.logits, inputs.draft_tokens, inputs.active, inputs.num_drafts)
    return Verification(tokens, num_emitted)
