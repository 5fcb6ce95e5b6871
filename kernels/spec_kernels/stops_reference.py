"""Plain torch decides here which requests go on behind a round: beside the kernel of `stops.py`, for comparison, and
where there is none."""

from __future__ import annotations

import torch


def going_on_reference(
    slot_ids: torch.Tensor,
    tokens: torch.Tensor,
    num_emitted: torch.Tensor,
    kv_lens: torch.Tensor,
    end_lens: torch.Tensor,
    heeds_eos: torch.Tensor,
    eos_token_ids: torch.Tensor,
    only_last: bool,
) -> torch.Tensor:
    """Return the slots [batch] of the next round: the scratch slot, the last one, for requests that have ended.

    Args:
        slot_ids: [batch] of the round just committed.
        tokens: [batch, N] emitted tokens, junk from column `num_emitted` [batch] on.
        kv_lens: [num_slots + 1] committed lengths behind the round.
        end_lens: [num_slots + 1] the length from which a request has all its tokens; 0 of the scratch slot.
        heeds_eos: [num_slots + 1] int64, 1 where an end of sequence ends the request, else 0.
        eos_token_ids: [number of them].
        only_last: no token but the last emitted one can be an end of sequence.
    """
    last = num_emitted.unsqueeze(1) - 1
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    is_decided = columns == last if only_last else columns <= last
    is_end = (tokens.unsqueeze(2) == eos_token_ids).any(dim=2) & is_decided
    has_end = is_end.any(dim=1) & (heeds_eos.index_select(0, slot_ids) > 0)
    has_all = kv_lens.index_select(0, slot_ids) >= end_lens.index_select(0, slot_ids)
    return slot_ids.masked_fill(has_end | has_all, kv_lens.shape[0] - 1)
