"""How many of the drafts in its slot each request offers for verification.

Whether a sampled draft is offered depends neither on its own token nor on later tokens of its request. So the output
keeps the target's distribution, whichever drafts are left out.
"""

from __future__ import annotations

import torch

from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op


def count_offered(
    slot_ids: torch.Tensor, active: torch.Tensor, num_drafted: torch.Tensor, limits: torch.Tensor, most: int
) -> torch.Tensor:
    """Count the drafts [batch] that `slot_ids` [batch] offer: up to `most`, and none where `active` [batch] is false.

    Each slot has `num_drafted` [num_slots + 1] drafts, of which its request offers at most `limits` [num_slots + 1].
    """
    waiting = torch.minimum(num_drafted, limits).index_select(0, slot_ids)
    return torch.where(active, waiting.clamp(max=most), 0)


class DraftOffers:
    """Counts the drafts that slots offer.

    Attributes:
        num_drafted: [num_slots + 1] drafts that each slot holds, up to K.
        limits: [num_slots + 1] drafts that each slot's request may offer.
    """

    def __init__(
        self, num_slots: int, num_draft_tokens: int, device: torch.device, kernels: KernelSet = TORCH_FORMS
    ) -> None:
        self._count = kernels.get(Op.COUNT_OFFERED, count_offered)
        self.num_drafted = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.limits = torch.full_like(self.num_drafted, num_draft_tokens)

    def of(self, slot_ids: torch.Tensor, active: torch.Tensor, most: int) -> torch.Tensor:
        """Count the offered drafts [batch] of `slot_ids` [batch]: up to `most`, and none where `active` [batch] is
        false."""
        return self._count(slot_ids, active, self.num_drafted, self.limits, most)

    def expect(self, slot_ids: torch.Tensor, num_drafts: int) -> None:
        """Record that `slot_ids` [batch] will hold `num_drafts` drafts each."""
        self.num_drafted.index_fill_(0, slot_ids, num_drafts)
