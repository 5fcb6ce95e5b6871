"""A drafter's confidence is made of how likely its head thinks the likeliest token."""

from __future__ import annotations

import torch


def top_probability(logits: torch.Tensor) -> torch.Tensor:
    """Return the largest probability [rows] of logits [rows, vocab], in float32."""
    return torch.softmax(logits, dim=-1, dtype=torch.float32).amax(dim=-1)
