"""The standing of drafts: their rank and probability under the target, by which deterministic rules judge them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from spec_lab.acceptance.distribution import at_tokens


@dataclass(slots=True)
class DraftStanding:
    """Rank and probability of each draft under the target. Fields are [batch, K] unless noted otherwise.

    Attributes:
        is_top: whether the draft is the argmax.
        rank: the number of tokens that are likelier, or equally likely with a lower id.
        probability: the draft's probability.
        top: the largest probability of the row.
        top_probabilities: [batch, K, topk] the largest probabilities, if a record has them; None during a run.
    """

    is_top: torch.Tensor
    rank: torch.Tensor
    probability: torch.Tensor
    top: torch.Tensor
    top_probabilities: torch.Tensor | None = None


def stand(logits: torch.Tensor, draft_tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute the tensors that `round_standing` returns: the first four fields of `DraftStanding`, then the argmax."""
    standing = draft_standing(logits[:, :-1], draft_tokens)
    return standing.is_top, standing.rank, standing.probability, standing.top, logits.argmax(dim=-1)


def round_standing(
    logits: torch.Tensor, draft_tokens: torch.Tensor, stand: Callable[..., tuple[torch.Tensor, ...]] = stand
) -> tuple[DraftStanding, torch.Tensor]:
    """Return the standing of drafts [batch, K] in the first K rows of logits [batch, N, vocab], and the argmax [batch,
    N] of all rows. `stand` computes both."""
    is_top, rank, probability, top, top_tokens = stand(logits, draft_tokens)
    return DraftStanding(is_top, rank, probability, top), top_tokens


def draft_standing(logits: torch.Tensor, draft_tokens: torch.Tensor) -> DraftStanding:
    """Return the standing of drafts [batch, K] in logits [batch, K, vocab].

    Ranks are counted, since `torch.topk` promises no order of equal values. They are counted on logits, since different
    logits can have the same float32 probability, and rank 0 must be the argmax.
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
