"""Block verification judges the drafts together, not one by one (Sun et al., arXiv 2403.10444, algorithm 2).

A draft that the target finds unlikely can be compensated by a likely one after it. So the expected number of accepted
tokens is never below that of token-by-token verification. The output distribution is the same.
"""

from __future__ import annotations

import torch

from spec_lab.acceptance.distribution import at_tokens, total
from spec_lab.acceptance.tokenwise import Decision, clipped_ratio


def block_decision(p: torch.Tensor, q: torch.Tensor, draft_tokens: torch.Tensor) -> Decision:
    """Return thresholds h_1..h_K and scales P_0..P_K; shapes as in `tokenwise_decision`.

    P_0 = 1, and P_i = min(1, P_{i-1} p(x_i) / q(x_i)) measures how well the target agrees with the first i drafts. Let
    S_i be the sum of max(P_i p - q, 0) at the next position. Then h_i = S_i / (S_i + 1 - P_i) for i < K, and h_K = P_K.
    """
    p_drafts, q_drafts = at_tokens(p[:, :-1], draft_tokens), at_tokens(q, draft_tokens)
    followed = [torch.ones_like(p[:, 0, 0])]
    for i in range(draft_tokens.shape[1]):
        followed.append(clipped_ratio(followed[-1] * p_drafts[:, i], q_drafts[:, i]))
    scales = torch.stack(followed, dim=1)
    inner = scales[:, 1:-1]
    left = total((inner.unsqueeze(-1) * p[:, 1:-1] - q[:, 1:]).clamp(min=0)).to(p.dtype)
    denominator = left + (1 - inner)
    # 0 / 0 means P_i = 1 and p = q at the next position. Then a longer prefix is always accepted, so any value will do.
    inner_thresholds = torch.where(denominator > 0, left / denominator, 1)
    return Decision(torch.cat((inner_thresholds, scales[:, 1:][:, -1:]), dim=1), scales)


def longest(passed: torch.Tensor) -> torch.Tensor:
    """Return the length [batch] of the longest prefix whose own test in `passed` [batch, K] passes; shorter ones may
    fail."""
    lengths = torch.arange(1, passed.shape[1] + 1, device=passed.device)
    none = lengths.new_zeros((passed.shape[0], 1))
    return torch.cat((none, torch.where(passed, lengths, 0)), dim=1).amax(dim=1)
