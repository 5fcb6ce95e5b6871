"""Graph modes: how a round is run on the device."""

from __future__ import annotations

from collections.abc import Callable

from spec_lab.core.types import GraphCounts, RoundBatch, Verification


class EagerGraph:
    """graph=eager: every operation is launched from Python, batches are not padded."""

    def __init__(self) -> None:
        self.counts = GraphCounts(mode="eager")

    def run(self, decode_round: Callable[[RoundBatch], Verification], batch: RoundBatch) -> Verification:
        return decode_round(batch)

    def padded_size(self, num_requests: int) -> int:
        return num_requests
