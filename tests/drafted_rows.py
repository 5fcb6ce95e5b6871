"""Requests for parts that are asked for drafts, and read nothing of who asks."""

from __future__ import annotations

import torch

from spec_lab.drafters.picking import DraftedRows


def no_rows(batch_size: int) -> DraftedRows:
    """Return rows [batch_size] of the first slots, at no length."""
    return DraftedRows(torch.arange(batch_size), torch.zeros(batch_size, dtype=torch.int64))
