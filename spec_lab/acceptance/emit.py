"""Every rule makes its `Verification` here from the drafts that it accepted."""

from __future__ import annotations

import torch

from spec_lab.core.types import AcceptanceInputs, Verification


def leading(passed: torch.Tensor) -> torch.Tensor:
    """Count in [batch, K] bool how many columns [batch] pass before the first that does not."""
    return passed.long().cumprod(dim=1).sum(dim=1)


def only_offered(inputs: AcceptanceInputs, passed: torch.Tensor) -> torch.Tensor:
    """Fail the tests [batch, K] of drafts that are not offered, so that no rule accepts one."""
    offered = inputs.offered
    return passed if offered is None else passed & offered


def emit(inputs: AcceptanceInputs, num_accepted: torch.Tensor, last: torch.Tensor) -> Verification:
    """Emit the accepted drafts and then `last`, the correction or bonus token; both arguments [batch]."""
    tokens = torch.cat((inputs.draft_tokens, last.unsqueeze(1)), dim=1)
    tokens = tokens.scatter(1, num_accepted.unsqueeze(1), last.unsqueeze(1))
    return Verification(tokens, torch.where(inputs.active, num_accepted + 1, 0))
