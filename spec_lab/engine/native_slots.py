"""kernels=native leaves the next round's inputs in the slots in one call."""

from __future__ import annotations

import torch

from spec_kernels.native.rounds import commit_into


def commit_native_rows(
    kv_lens: torch.Tensor,
    input_ids: torch.Tensor,
    slot_ids: torch.Tensor,
    tokens: torch.Tensor,
    num_emitted: torch.Tensor,
    draft_tokens: torch.Tensor,
) -> torch.Tensor:
    """Do what `commit_rows` does."""
    last = torch.empty_like(num_emitted)
    commit_into(kv_lens, input_ids, last, slot_ids, tokens, num_emitted, draft_tokens)
    return last
