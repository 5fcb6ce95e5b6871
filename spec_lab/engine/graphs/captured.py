"""The base of all captured graph modes: buckets of batch sizes, captured on scratch rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from spec_lab.core.results import GraphCounts
from spec_lab.core.types import Request, Verification
from spec_lab.engine.capture import GraphRecorder
from spec_lab.engine.graphs.segment import Segment
from spec_lab.engine.round import DecodeRound


@dataclass(slots=True)
class Bucket:
    """The captured segments of one batch size, each made when it is first called.

    Attributes:
        slot_ids: [bucket size] the slots of a replay's requests, padded with the scratch slot. Replays read this
            tensor.
        held: the slots that the host last wrote to `slot_ids`, in order; empty if it must write them again.
        copies: the segments by name, once for each copy of a graph that the recorder makes.
        fixed: tensors that segments read without copying: `slot_ids`, and outputs of segments.
    """

    slot_ids: torch.Tensor
    copies: list[dict[str, Segment[Any, Any]]]
    held: list[int] = field(default_factory=list)
    fixed: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fixed.append(self.slot_ids)

    @property
    def segments(self) -> dict[str, Segment[Any, Any]]:
        """Return the segments of the current copy."""
        return self.copies[0]

    def take_turns(self) -> None:
        """Make the next copy the current one."""
        self.copies.append(self.copies.pop(0))


@dataclass(eq=False)
class CapturedMode(ABC):
    """Pads a batch with the scratch slot to the next bucket size: a power of two, or the number of slots.

    Each `DecodeRound` has buckets of its own. A bucket is captured in a round of scratch rows only. They emit nothing,
    and write only the scratch page and the scratch rows of per-slot state.

    Attributes:
        max_kv_len: the longest possible committed length. It is frozen in the graphs, so no replay can use a tighter
            bound.
    """

    rounds_per_replay = 1
    looks_at_lengths = False

    name: str
    recorder: GraphRecorder
    num_slots: int
    max_kv_len: int

    def __post_init__(self) -> None:
        self.counts = GraphCounts(mode=self.name)
        self.buckets: dict[tuple[DecodeRound, int], Bucket] = {}

    def padded_size(self, num_requests: int) -> int:
        return min(1 << (num_requests - 1).bit_length(), self.num_slots)

    def prepare(self, decode_round: DecodeRound, num_requests: int) -> None:
        size = self.padded_size(num_requests)
        place = decode_round, size
        if place not in self.buckets:
            bucket = Bucket(decode_round.parts.slots.ids([], size), [{} for _ in range(self.recorder.num_copies)])
            for _ in range(self.recorder.num_copies):
                bucket.take_turns()
                self._run(bucket, decode_round, bucket.slot_ids)
            self.buckets[place] = bucket

    def admit(self, slot: int, request: Request) -> None:
        """Do nothing, since the host reads every round. `SeveralRounds` overrides this."""
        return

    def run(self, decode_round: DecodeRound, slots: list[int], max_kv_len: int) -> Verification:
        size = self.padded_size(len(slots))
        assert max_kv_len <= self.max_kv_len
        bucket = self.buckets[decode_round, size]
        if bucket.held != slots:  # they are mostly those of the last round, and then nothing is copied to the device
            bucket.slot_ids.copy_(decode_round.parts.slots.ids(slots, size))
            bucket.held = slots
        bucket.take_turns()
        return self._run(bucket, decode_round, bucket.slot_ids)

    @abstractmethod
    def _run(self, bucket: Bucket, decode_round: DecodeRound, slot_ids: torch.Tensor) -> Verification:
        """Run one round over [bucket size] slots."""

    def _segment(
        self, bucket: Bucket, decode_round: DecodeRound, name: str, function: Callable[[Any], Any], stage: str = ""
    ) -> Segment[Any, Any]:
        """Return the bucket's segment of that name; if it is new, it captures `function`."""
        if name not in bucket.segments:
            bucket.segments[name] = Segment(
                name,
                stage or name,
                function,
                self.recorder,
                parts=decode_round.parts,
                counts=self.counts,
                fixed=bucket.fixed,
            )
        return bucket.segments[name]


class WholeRound(CapturedMode):
    """graph=round: one graph replays verify, accept, commit, catch-up and all draft steps.

    Its input is the slot ids, and its output for the host is the verification.
    """

    def _run(self, bucket: Bucket, decode_round: DecodeRound, slot_ids: torch.Tensor) -> Verification:
        def run(slot_ids: torch.Tensor) -> Verification:
            return decode_round.run(decode_round.load(slot_ids, self.max_kv_len))

        verification: Verification = self._segment(bucket, decode_round, "round", run, stage="graph")(slot_ids)
        return verification
