"""The logits of a head whose vocabulary may be smaller than the target's, and its confidence."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class ScoredTokens:
    """A head's logits [rows, tokens of the head].

    Attributes:
        token_ids: [tokens of the head] their target ids, or [rows, tokens of the head] if rows differ; None if the
            head's ids are target ids.
    """

    logits: torch.Tensor
    token_ids: torch.Tensor | None = None


def top_probability(logits: torch.Tensor) -> torch.Tensor:
    """Return the largest probability [rows] of logits [rows, vocab], in float32: a drafter's confidence."""
    return torch.softmax(logits, dim=-1, dtype=torch.float32).amax(dim=-1)
