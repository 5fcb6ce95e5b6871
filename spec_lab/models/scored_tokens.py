"""The logits of a head that may know fewer tokens than its target."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class ScoredTokens:
    """A head's logits [rows, tokens of the head].

    Attributes:
        token_ids: [tokens of the head] what they stand for; None where each is its own number.
    """

    logits: torch.Tensor
    token_ids: torch.Tensor | None = None
