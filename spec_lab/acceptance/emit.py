"""Makes the `Verification` of a rule from the drafts that it accepted."""

from __future__ import annotations

import torch

from spec_lab.core.types import AcceptanceInputs, Verification


def leading(passed: torch.Tensor) -> torch.Tensor:
    """Count the leading true columns of `passed` [batch, K], and return [batch]."""
    return passed.long().cumprod(dim=1).sum(dim=1)


def only_offered(passed: torch.Tensor, num_drafts: torch.Tensor | None) -> torch.Tensor:
    """Set `passed` [batch, K] to false after the first `num_drafts` [batch] drafts, so that no rule accepts one that is
    not offered; None keeps all."""
    if num_drafts is None:
        return passed
    return passed & (torch.arange(passed.shape[1], device=num_drafts.device) < num_drafts.unsqueeze(1))


def emit(inputs: AcceptanceInputs, num_accepted: torch.Tensor, last: torch.Tensor) -> Verification:
    """Emit the accepted drafts and then `last` [batch], the correction or bonus token; nothing for inactive rows."""
    tokens = append(inputs.draft_tokens, num_accepted, last)
    return Verification(tokens, torch.where(inputs.active, num_accepted + 1, 0))


def append(draft_tokens: torch.Tensor, num_accepted: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Put `last` [batch] after the accepted drafts of `draft_tokens` [batch, K], and return [batch, K + 1]."""
    tokens = torch.cat((draft_tokens, last.unsqueeze(1)), dim=1)
    return tokens.scatter(1, num_accepted.unsqueeze(1), last.unsqueeze(1))
