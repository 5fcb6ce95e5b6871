"""graph=eager: every operation is launched from Python."""

from __future__ import annotations

from spec_lab.core.results import GraphCounts
from spec_lab.core.types import Request, Verification
from spec_lab.engine.round import DecodeRound


class EagerGraph:
    """Rounds without graphs. Batches are not padded."""

    recorder = None
    rounds_per_replay = 1
    looks_at_lengths = True

    def __init__(self) -> None:
        self.counts = GraphCounts(mode="eager")

    def padded_size(self, num_requests: int) -> int:
        return num_requests

    def prepare(self, decode_round: DecodeRound, num_requests: int) -> None:
        """Do nothing: there is nothing to capture."""

    def admit(self, slot: int, request: Request) -> None:
        """Do nothing: the host looks at every round."""

    def run(self, decode_round: DecodeRound, slots: list[int], max_kv_len: int) -> Verification:
        slot_ids = decode_round.parts.slots.ids(slots, self.padded_size(len(slots)))
        return decode_round.run(decode_round.load(slot_ids, max_kv_len))
