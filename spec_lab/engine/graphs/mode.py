"""This module says what a graph mode promises to the engine."""

from __future__ import annotations

from typing import Protocol

from spec_lab.core.results import GraphCounts
from spec_lab.core.types import Request, Verification
from spec_lab.engine.capture import GraphRecorder
from spec_lab.engine.round import DecodeRound


class GraphMode(Protocol):
    """Runs a round directly, or by capture and replay.

    Attributes:
        rounds_per_replay: rounds that one `run` is, R.
        skips_rounds: a round behind the end of all requests does not run.
        looks_at_lengths: `run` makes use of `max_kv_len`, which must so be that of all rounds before, so that the
            engine accounts for a round before it launches the next; in a captured mode, which does not look, after.
    """

    counts: GraphCounts
    rounds_per_replay: int
    skips_rounds: bool
    looks_at_lengths: bool

    @property
    def recorder(self) -> GraphRecorder | None:
        """Return what captures; None where nothing is captured."""
        ...

    def prepare(self, decode_round: DecodeRound, num_requests: int) -> None:
        """Capture what a round of `num_requests` needs, if that has not been done; touches the scratch slot only."""
        ...

    def admit(self, slot: int, request: Request) -> None:
        """Note what rounds that the host does not look at must know of the request that takes `slot`."""
        ...

    def run(self, decode_round: DecodeRound, slots: list[int], max_kv_len: int) -> Verification:
        """Run R rounds over the requests in `slots`, whose committed lengths are at most `max_kv_len`.

        Returns:
            A verification of R times `padded_size` rows, those of the first round first.
        """
        ...

    def padded_size(self, num_requests: int) -> int:
        """Return the rows of a round of `num_requests`: for a captured mode, the size of its bucket."""
        ...
