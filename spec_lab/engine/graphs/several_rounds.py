"""graph=round with graph.rounds_per_replay=R: one graph holds R rounds, between which the host does nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any

import torch

from spec_lab.core.types import Request, Verification
from spec_lab.engine.graphs.captured import Bucket, CapturedMode
from spec_lab.engine.round import DecodeRound
from spec_lab.engine.stops import StopConditions


@dataclass(eq=False)
class SeveralRounds(CapturedMode):
    """Replays one graph for R rounds. A request that ends in one of them is a padded row from the next one on.

    A padded row emits nothing, and writes only the scratch page and the scratch rows of per-slot state. So the slot of
    the ended request stays as its last round left it. The engine reads all R verifications at once.

    With `ahead` a replay is launched before the previous one is read. Each replay therefore rewrites the slot ids that
    the next one reads, with the scratch slot in place of those of ended requests.
    """

    num_rounds: int
    stops: StopConditions
    ahead: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rounds_per_replay = self.counts.rounds_per_replay = self.num_rounds

    def admit(self, slot: int, request: Request) -> None:
        self.stops.admit(slot, request)
        for bucket in self.buckets.values():
            bucket.held = []  # on the device, slots of ended requests may have been replaced

    def _run(self, bucket: Bucket, decode_round: DecodeRound, slot_ids: torch.Tensor) -> Verification:
        def run(slot_ids: torch.Tensor) -> Verification:
            return self._rounds(decode_round, slot_ids)

        verification: Verification = self._segment(bucket, decode_round, "rounds", run, stage="graph")(slot_ids)
        return verification

    def _rounds(self, decode_round: DecodeRound, slot_ids: torch.Tensor) -> Verification:
        """Run all rounds over [batch] slots, and return their verifications joined."""
        verifications: list[Verification] = []
        running = slot_ids
        for index in range(self.rounds_per_replay):
            with self._marks(decode_round, index):
                if verifications:
                    running = self._going_on(decode_round, running, verifications[-1])
                verifications.append(decode_round.run(decode_round.load(running, self.max_kv_len)))
        if self.ahead:
            with self._marks(decode_round, self.rounds_per_replay):
                slot_ids.copy_(self._going_on(decode_round, running, verifications[-1]))
        return one_after_another(verifications)

    def _marks(self, decode_round: DecodeRound, index: int) -> AbstractContextManager[None]:
        """Return the timing context of round `index`: marks of its own, or no marks if the next replay overwrites
        them."""
        timer = decode_round.parts.timer
        return timer.unmarked() if self.ahead else timer.inner_round(index)

    def _going_on(self, decode_round: DecodeRound, slot_ids: torch.Tensor, verification: Verification) -> torch.Tensor:
        """Return the slots [batch], with the scratch slot in place of those whose request has ended."""
        parts = decode_round.parts
        with parts.timer.span("commit"):
            return self.stops.going_on(slot_ids, parts.slots.kv_lens, verification, parts.rule.traits.imposed)


def one_after_another(rounds: Sequence[Verification]) -> Verification:
    """Join verifications of [batch] rows into one of [rounds * batch] rows."""
    parts: dict[str, Any] = {}
    for field in fields(Verification):
        present = [part for part in (getattr(each, field.name) for each in rounds) if part is not None]
        parts[field.name] = torch.cat(present) if present else None  # None if the rounds do not have it
    return Verification(**parts)
