"""The work between two replayed draft steps is one launch of `spec_kernels`."""

from __future__ import annotations

from typing import Any

import torch

from spec_kernels.draft_step import update_draft_inputs


def triton_carry(drafts: torch.Tensor, column: torch.Tensor, before: Any, after: Any) -> None:
    """Keep the protocol `DraftCarry`, for a state whose steps replace `tokens` and `hidden` and nothing else."""
    update_draft_inputs(drafts, before.tokens, before.hidden, after.tokens, after.hidden, column)
