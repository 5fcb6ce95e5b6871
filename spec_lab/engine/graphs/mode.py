"""The protocol of graph modes."""

from __future__ import annotations

from typing import Protocol

from spec_lab.core.results import GraphCounts
from spec_lab.core.types import Request, Verification
from spec_lab.engine.capture import GraphRecorder
from spec_lab.engine.round import DecodeRound


class GraphMode(Protocol):
    """Runs a round directly, or by capture and replay.

    Attributes:
        rounds_per_replay: rounds in one `run`, R.
        looks_at_lengths: whether `run` uses `max_kv_len`. If so, the engine accounts for each round before it launches
            the next one. Captured modes do not use it, so the accounting can come after the launch.
    """

    counts: GraphCounts
    rounds_per_replay: int
    looks_at_lengths: bool

    @property
    def recorder(self) -> GraphRecorder | None:
        """Return the recorder; None if nothing is captured."""
        ...

    def prepare(self, decode_round: DecodeRound, num_requests: int) -> None:
        """Capture the graphs for a round of `num_requests`, unless that has been done. Only the scratch slot is
        touched."""
        ...

    def admit(self, slot: int, request: Request) -> None:
        """Store on the device what is needed to end the request in `slot` without the host, if the mode does so."""
        ...

    def run(self, decode_round: DecodeRound, slots: list[int], max_kv_len: int) -> Verification:
        """Run R rounds over the requests in `slots`, whose committed lengths are at most `max_kv_len`.

        Returns:
            A verification of R times `padded_size` rows, in the order of the rounds.
        """
        ...

    def padded_size(self, num_requests: int) -> int:
        """Return the padded number of requests of a round: for a captured mode, the size of its bucket."""
        ...
