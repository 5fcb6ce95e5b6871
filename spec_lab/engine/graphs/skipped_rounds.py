"""graph=round with graph.skip_ended=true: a replay skips its rounds behind the end of all requests."""

from __future__ import annotations

from dataclasses import fields

import torch

from spec_lab.core.trees import map_tensors
from spec_lab.core.types import Verification
from spec_lab.engine.capture import GraphRecorder
from spec_lab.engine.graphs.several_rounds import SeveralRounds
from spec_lab.engine.round import DecodeRound
from spec_lab.engine.stops import StopConditions


class SkippedRounds(SeveralRounds):
    """Has each round but the first in an IF node, where the recorder has such nodes; elsewhere they run on padding.

    A round that is skipped writes nothing, so what it hands on lies in tensors from before it. No event may be recorded
    inside such a node: only the first round of a replay has marks of its stages.
    """

    def __init__(
        self,
        name: str,
        recorder: GraphRecorder,
        num_slots: int,
        max_kv_len: int,
        num_rounds: int,
        stops: StopConditions,
    ) -> None:
        super().__init__(name, recorder, num_slots, max_kv_len, num_rounds, stops)
        self.skips_rounds = recorder.skips

    def _rounds(self, decode_round: DecodeRound, slot_ids: torch.Tensor) -> Verification:
        parts = decode_round.parts
        with parts.timer.inner_round(0):
            verification = decode_round.run(decode_round.load(slot_ids, self._max_kv_len))
        kept = room_for(verification, self.rounds_per_replay)
        running = slot_ids.clone()

        def keep(index: int, verification: Verification) -> None:
            put(kept, index, verification)
            running.copy_(self._going_on(decode_round, running, verification))

        with parts.timer.inner_round(0):
            keep(0, verification)
        for index in range(1, self.rounds_per_replay):
            with self.recorder.when_any(running, parts.slots.table.scratch_slot), parts.timer.unmarked():
                keep(index, decode_round.run(decode_round.load(running, self._max_kv_len)))
        return kept


def room_for(verification: Verification, num_rounds: int) -> Verification:
    """Make zeros for verifications of so many rounds: a request emits nothing in one that is skipped."""

    def room(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_zeros((num_rounds * tensor.shape[0], *tensor.shape[1:]))

    return map_tensors(verification, room)


def put(kept: Verification, index: int, verification: Verification) -> None:
    """Copy a round's verification to its place among those of all rounds."""
    for part in fields(Verification):
        value = getattr(verification, part.name)
        if value is not None:
            batch = value.shape[0]
            getattr(kept, part.name)[index * batch : (index + 1) * batch].copy_(value)
