"""Drafts are sampled with `spec_kernels`: one pass draws and keeps, with the same noise."""

from __future__ import annotations

import torch

from spec_kernels.gumbel import sample_draft
from spec_lab.acceptance.draft_sampling import DraftLogits
from spec_lab.acceptance.noise import SlotSeeds


def triton_sample_and_keep(
    kept: DraftLogits,
    seeds: SlotSeeds,
    logits: torch.Tensor,
    slot_ids: torch.Tensor,
    kv_lens: torch.Tensor,
    column: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """Samples one draft token a request in one kernel, as `DraftSampler` says."""
    tokens = torch.empty_like(slot_ids)
    sample_draft(tokens, kept.values, logits, slot_ids, seeds.values, kv_lens, column, temperature)
    return tokens
