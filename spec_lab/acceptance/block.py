"""Block verification judges the drafts together, not one by one (Sun et al., arXiv 2403.10444, algorithm 2).

A draft that is unlikely for the target can be paid for by a likely one behind it, so the expected number of accepted
tokens is never below that of token-by-token verification, at the same output distribution.
"""

from __future__ import annotations

import torch

from spec_lab.acceptance.distribution import at_tokens, total
from spec_lab.acceptance.tokenwise import Decision, clipped_ratio


def block_decision(p: torch.Tensor, q: torch.Tensor, draft_tokens: torch.Tensor) -> Decision:
    """Return thresholds h_1..h_K and scales P_0..P_K; shapes as in `tokenwise_decision`.

    P_i = min(1, P_{i-1} p(x_i) / q(x_i)), P_0 = 1, is how far the target follows the first i drafts. With S_i the mass
    of max(P_i p - q, 0) at the next position, h_i = S_i / (S_i + 1 - P_i), and h_K = P_K.
    """
    p_drafts, q_drafts = at_tokens(p[:, :-1], draft_tokens), at_tokens(q, draft_tokens)
    followed = [torch.ones_like(p[:, 0, 0])]
    for i in range(draft_tokens.shape[1]):
        followed.append(clipped_ratio(followed[-1] * p_drafts[:, i], q_drafts[:, i]))
    scales = torch.stack(followed, dim=1)
    inner = scales[:, 1:-1]
    left = total((inner.unsqueeze(-1) * p[:, 1:-1] - q[:, 1:]).clamp(min=0)).to(p.dtype)
    denominator = left + (1 - inner)
    # 0 / 0 is P_i = 1 with p = q behind it: a longer prefix is then accepted for certain, so any value will do.
    inner_thresholds = torch.where(denominator > 0, left / denominator, 1)
    return Decision(torch.cat((inner_thresholds, scales[:, 1:][:, -1:]), dim=1), scales)


def longest(passed: torch.Tensor) -> torch.Tensor:
    """Return from [batch, K] bool the length [batch] of the longest prefix whose own test passes, whatever came
    before."""
    lengths = torch.arange(1, passed.shape[1] + 1, device=passed.device)
    none = lengths.new_zeros((passed.shape[0], 1))
    return torch.cat((none, torch.where(passed, lengths, 0)), dim=1).amax(dim=1)
