"""The logits of a head that may know fewer tokens than its target, and how sure it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class ScoredTokens:
    """A head's logits [rows, tokens of the head].

    Attributes:
        token_ids: [tokens of the head] what they stand for, or [rows, tokens] where each row has its own; None where
            each is its own number.
    """

    logits: torch.Tensor
    token_ids: torch.Tensor | None = None


def top_probability(logits: torch.Tensor) -> torch.Tensor:
    """Return the largest probability [rows] of logits [rows, vocab], in float32: a drafter's confidence."""
    return torch.softmax(logits, dim=-1, dtype=torch.float32).amax(dim=-1)
