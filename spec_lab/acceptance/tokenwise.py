"""Token-by-token verification: the rejection rule of speculative sampling (Leviathan et al., arXiv 2211.17192).

The functions of probabilities here and in `block` are pure and keep the dtype. So tests can enumerate the rule's
decisions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_lab.acceptance.distribution import at_tokens


@dataclass(slots=True)
class Decision:
    """A rule's decision up to the random draws.

    Attributes:
        thresholds: [batch, K] draft j passes its test if its uniform draw is below this.
        scales: [batch, N] the factor of p in row m's residual, max(scale * p - q, 0), after m accepted drafts.
    """

    thresholds: torch.Tensor
    scales: torch.Tensor


def clipped_ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """Return min(1, numerator / denominator) of values that are not negative; 0 / 0 is 0."""
    clipped = (numerator > 0).to(numerator.dtype)
    return torch.where(numerator >= denominator, clipped, numerator / denominator)


def tokenwise_decision(p: torch.Tensor, q: torch.Tensor, draft_tokens: torch.Tensor) -> Decision:
    """Accept draft x with probability min(1, p(x) / q(x)).

    Args:
        p: [batch, N, vocab] the target's probabilities.
        q: [batch, K, vocab] the probabilities the drafts were sampled from.
        draft_tokens: [batch, K].
    """
    thresholds = clipped_ratio(at_tokens(p[:, :-1], draft_tokens), at_tokens(q, draft_tokens))
    return Decision(thresholds, torch.ones_like(p[..., 0]))


def residual(p: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the weights [batch, vocab] of the last token: max(scale * p - q, 0), or p if that is 0 everywhere.

    It is 0 everywhere if the drafts were sampled from the target's own distribution. Then only rounding can reject one.
    The bonus row has q = 0, which gives p up to a factor.
    """
    weights = (scale.unsqueeze(-1) * p - q).clamp(min=0)
    return torch.where((weights > 0).any(dim=-1, keepdim=True), weights, p)


def residual_after(p: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, num_accepted: torch.Tensor) -> torch.Tensor:
    """Return the `residual` [batch, vocab] of row `num_accepted` [batch]; shapes as in `tokenwise_decision`."""
    row = num_accepted.view(-1, 1, 1).expand(-1, 1, p.shape[-1])
    bonus = torch.zeros_like(p[:, :1])
    reached_q = torch.cat((q, bonus), dim=1).gather(1, row).squeeze(1)
    return residual(p.gather(1, row).squeeze(1), reached_q, at_tokens(scales, num_accepted))
