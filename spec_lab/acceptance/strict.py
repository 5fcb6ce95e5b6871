"""Strict greedy acceptance: the longest prefix of drafts equal to the target's argmax, plus one token."""

from __future__ import annotations

import torch

from spec_lab.core.types import Verification


class StrictAcceptance:
    """Row j of the target predicts the token after input j, so draft j is right when argmax of row j equals it.

    m = number of leading matches; emitted = argmax of rows 0..m, n = m + 1: for the accepted rows the argmax *is* the
    draft, and row m gives the correction, or the bonus token when m = K. Ties go to the lowest token id.
    """

    def accept(self, logits: torch.Tensor, draft_tokens: torch.Tensor, active: torch.Tensor) -> Verification:
        tokens = logits.argmax(dim=-1)
        matches = tokens[:, :-1] == draft_tokens
        num_accepted = matches.long().cumprod(dim=1).sum(dim=1)
        return Verification(tokens, torch.where(active, num_accepted + 1, 0))
