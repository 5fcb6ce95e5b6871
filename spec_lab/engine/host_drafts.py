"""Drafts that the host makes between the reading of a round and the launch of the next go to the slots here."""

from __future__ import annotations

from collections.abc import Sequence as List

import torch

from spec_lab.core.protocols import HostDrafter
from spec_lab.core.types import Sequence
from spec_lab.engine.offered import DraftOffers
from spec_lab.engine.slots import SlotState


class HostDrafts:
    """Puts the drafts of a `HostDrafter` behind the pending tokens of the slots, over what the device drafted."""

    def __init__(self, drafter: HostDrafter, slots: SlotState, offered: DraftOffers) -> None:
        self.drafter = drafter
        self._slots = slots
        self._offered = offered

    def offer(self, sequences: List[Sequence]) -> int:
        """Draft for `sequences`, whose tokens are all known, and return how many drafts there are.

        Everything goes to the device in one copy, which nobody waits for.
        """
        width = self._slots.input_ids.shape[1] - 1
        found = zip(sequences, self.drafter.draft(sequences), strict=True)
        rows = [
            [sequence.slot, len(drafts), *drafts, *[0] * (width - len(drafts))]
            for sequence, drafts in found
            if drafts is not None
        ]
        if rows:
            table = torch.tensor(rows, pin_memory=self._slots.input_ids.is_cuda)
            slot_ids, counts, drafts = table.to(self._slots.input_ids.device, non_blocking=True).split((1, 1, width), 1)
            self._slots.input_ids[:, 1:].index_copy_(0, slot_ids.flatten(), drafts)
            self._offered.num_drafted.index_copy_(0, slot_ids.flatten(), counts.flatten())
        return sum(row[1] for row in rows)
