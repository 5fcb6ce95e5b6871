"""graph=round with graph.skip_ended=true: a replay skips the rounds that remain once all requests have ended."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields

import torch

from spec_lab.core.trees import map_tensors
from spec_lab.core.types import Verification
from spec_lab.engine.capture import GraphRecorder
from spec_lab.engine.graphs.captured import Bucket
from spec_lab.engine.graphs.several_rounds import SeveralRounds
from spec_lab.engine.round import DecodeRound
from spec_lab.engine.stops import StopConditions


class SkippedRounds(SeveralRounds):
    """Puts each round but the first in an IF node. If the recorder has no IF nodes, these rounds run on padded rows.

    All rounds write their results to tensors that are made before the capture. A replay first sets them to zero, which
    is what a skipped round leaves. Events cannot be recorded inside an IF node, so only the first round of a replay has
    times by stage. A replay that is launched ahead may begin after all requests have ended. So its first round is in an
    IF node too, and no round has such times.
    """

    def __init__(
        self,
        name: str,
        recorder: GraphRecorder,
        num_slots: int,
        max_kv_len: int,
        num_rounds: int,
        stops: StopConditions,
        ahead: bool = False,
    ) -> None:
        super().__init__(name, recorder, num_slots, max_kv_len, num_rounds, stops, ahead)
        self.skips_rounds = recorder.skips
        self._kept: dict[int, Verification] = {}

    def _run(self, bucket: Bucket, decode_round: DecodeRound, slot_ids: torch.Tensor) -> Verification:
        if slot_ids.shape[0] not in self._kept:  # a round of scratch rows shows the shapes of the results
            verification = decode_round.run(decode_round.load(slot_ids, self._max_kv_len))
            self._kept[slot_ids.shape[0]] = room_for(verification, self.rounds_per_replay)
        return super()._run(bucket, decode_round, slot_ids)

    def _rounds(self, decode_round: DecodeRound, slot_ids: torch.Tensor) -> Verification:
        kept = map_tensors(self._kept[slot_ids.shape[0]], torch.Tensor.zero_)
        running = slot_ids if self._ahead else slot_ids.clone()
        for index in range(self.rounds_per_replay):
            with self._node(decode_round, index, running), self._marks(decode_round, index):
                verification = decode_round.run(decode_round.load(running, self._max_kv_len))
                put(kept, index, verification)
                running.copy_(self._going_on(decode_round, running, verification))
        return kept

    def _marks(self, decode_round: DecodeRound, index: int) -> AbstractContextManager[None]:
        return super()._marks(decode_round, index) if index == 0 else decode_round.parts.timer.unmarked()

    def _node(self, decode_round: DecodeRound, index: int, running: torch.Tensor) -> AbstractContextManager[None]:
        """Return the context that lets a replay skip round `index`. The first round always runs, unless launched
        ahead."""
        if index == 0 and not self._ahead:
            return nullcontext()
        return self.recorder.when_any(running, decode_round.parts.slots.table.scratch_slot)


def room_for(verification: Verification, num_rounds: int) -> Verification:
    """Make zeros for the verifications of `num_rounds` rounds; in a skipped round requests emit 0 tokens."""

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
