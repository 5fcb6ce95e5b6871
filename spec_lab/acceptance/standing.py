"""Every deterministic rule decides by the standing of the drafts in the eyes of the target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from spec_lab.acceptance.distribution import at_tokens


@dataclass(slots=True)
class DraftStanding:
    """How each draft token stands with the target: all that a deterministic rule needs to know. Each [batch, K].

    Attributes:
        is_top: the token is the argmax.
        rank: how many tokens are likelier, or equally likely with a lower id.
        probability: of the token.
        top: the largest probability of the row.
        top_probabilities: [batch, K, topk] the largest ones, where a record has them; None in a run.
    """

    is_top: torch.Tensor
    rank: torch.Tensor
    probability: torch.Tensor
    top: torch.Tensor
    top_probabilities: torch.Tensor | None = None


def stand(logits: torch.Tensor, draft_tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the four parts of `round_standing`'s standing, and the argmax [batch, N]."""
    standing = draft_standing(logits[:, :-1], draft_tokens)
    return standing.is_top, standing.rank, standing.probability, standing.top, logits.argmax(dim=-1)


def round_standing(
    logits: torch.Tensor, draft_tokens: torch.Tensor, stand: Callable[..., tuple[torch.Tensor, ...]] = stand
) -> tuple[DraftStanding, torch.Tensor]:
    """Return how the first K rows of logits [batch, N, vocab] see drafts [batch, K], and the argmax [batch, N] of all
    rows; `stand` computes both."""
    is_top, rank, probability, top, top_tokens = stand(logits, draft_tokens)
    return DraftStanding(is_top, rank, probability, top), top_tokens


def draft_standing(logits: torch.Tensor, draft_tokens: torch.Tensor) -> DraftStanding:
    """Find the standing of [batch, K] drafts in [batch, K, vocab] logits.

    Ranks are counted, not looked up in `torch.topk`, which promises no order of equal values. They are counted on the
    logits: two that differ can have the same float32 probability, and rank 0 has to be the argmax.
    """
    ids = torch.arange(logits.shape[-1], device=logits.device)
    own_id, own_logit = draft_tokens.unsqueeze(-1), logits.gather(-1, draft_tokens.unsqueeze(-1))
    ahead = (logits > own_logit) | ((logits == own_logit) & (ids < own_id))
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
    return DraftStanding(
        is_top=logits.argmax(dim=-1) == draft_tokens,
        rank=ahead.sum(dim=-1),
        probability=at_tokens(probabilities, draft_tokens),
        top=probabilities.amax(dim=-1),
    )
