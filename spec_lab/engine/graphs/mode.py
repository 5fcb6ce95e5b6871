"""This module says what a graph mode promises to the engine."""

from __future__ import annotations

from typing import Protocol

from spec_lab.core.results import GraphCounts
from spec_lab.core.types import Verification
from spec_lab.engine.round import DecodeRound


class GraphMode(Protocol):
    """Runs a round directly, or by capture and replay."""

    counts: GraphCounts

    def prepare(self, decode_round: DecodeRound, num_requests: int) -> None:
        """Capture what a round of `num_requests` needs, if that has not been done; touches the scratch slot only."""
        ...

    def run(self, decode_round: DecodeRound, slots: list[int], max_kv_len: int) -> Verification:
        """Run one round over the requests in `slots`, whose committed lengths are at most `max_kv_len`."""
        ...

    def padded_size(self, num_requests: int) -> int:
        """Return the rows of a round of `num_requests`: for a captured mode, the size of its bucket."""
        ...
