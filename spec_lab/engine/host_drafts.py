"""Writes drafts of the host into the slots. The host makes them before a launch, from all tokens so far."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

import torch

from spec_lab.core.protocols import HostDrafter
from spec_lab.core.types import Sequence
from spec_lab.engine.offered import DraftOffers
from spec_lab.engine.slots import SlotState


@dataclass(frozen=True, slots=True)
class HostOffer:
    """The number of drafts that the host made for a round: `num_drafts` in total, at most `longest` for one request."""

    num_drafts: int
    longest: int


@dataclass(frozen=True, slots=True)
class HostDrafts:
    """Writes the drafts of a `HostDrafter` after the pending tokens of the slots, over drafts of the device."""

    drafter: HostDrafter
    slots: SlotState
    offered: DraftOffers

    def offer(self, sequences: List[Sequence]) -> HostOffer:
        """Draft for `sequences`, whose tokens the host has all read.

        All drafts go to the device in one asynchronous copy.
        """
        width = self.slots.input_ids.shape[1] - 1
        found = self.drafter.draft(sequences)
        self._note(sequences, [int(drafts is None) for drafts in found])
        rows = [
            [sequence.slot, len(drafts), *drafts, *[0] * (width - len(drafts))]
            for sequence, drafts in zip(sequences, found, strict=True)
            if drafts is not None
        ]
        if rows:
            table = torch.tensor(rows, pin_memory=self.slots.input_ids.is_cuda)
            slot_ids, counts, drafts = table.to(self.slots.input_ids.device, non_blocking=True).split((1, 1, width), 1)
            self.slots.input_ids[:, 1:].index_copy_(0, slot_ids.flatten(), drafts)
            self.offered.num_drafted.index_copy_(0, slot_ids.flatten(), counts.flatten())
        counts_here = [row[1] for row in rows]
        return HostOffer(sum(counts_here), max(counts_here, default=0))

    def sit_out(self, sequences: List[Sequence]) -> None:
        """Record that a round of `sequences` has no drafts."""
        self._note(sequences, [None] * len(sequences))

    def _note(self, sequences: List[Sequence], parts: List[int | None]) -> None:
        """Record which drafter drafted for each sequence: 0 is that on the host, 1 that on the device, None neither."""
        names = self.drafter.part_names
        if names is not None:
            for sequence, part in zip(sequences, parts, strict=True):
                sequence.drafted_by.append("" if part is None else names[part])
