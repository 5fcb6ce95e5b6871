"""The rounds of the run's own loop: where each began, which drafts it judged, and how many it accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec_lab.core.results import RequestRecord
from spec_lab.core.types import Verification
from spec_lab.doctor.subject import Subject
from spec_lab.engine.engine import Engine
from spec_lab.engine.round import DecodeRound
from spec_lab.measure.audit import first_difference

DraftsByRound = Mapping[tuple[str, int], tuple[int, ...]]
"""Keyed by request id and L at the round's start."""


@dataclass(frozen=True, slots=True)
class LoopRound:
    """A round that began while the output still equalled plain decoding's.

    Attributes:
        text: index of the request.
        kv_len: L at its start; the drafts judged in it are for positions L + 1 to L + K.
        accepted: number of accepted drafts.
        drafts: the K drafts if they were recorded; for a tree its spine, padded with -1.
    """

    text: int
    kv_len: int
    accepted: int
    drafts: tuple[int, ...] = ()


class DraftRecorder:
    """A `GraphMode` that wraps an engine's own one, and records the drafts that the next round will judge.

    Between rounds the drafts are in the slots, whether rounds are captured or not. So the loop need not be changed.
    """

    def __init__(self, engine: Engine) -> None:
        self.drafts: dict[tuple[str, int], tuple[int, ...]] = {}
        self._graph, self._scheduler = engine.graph, engine.scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)

    def run(self, decode_round: DecodeRound, slots: list[int], max_kv_len: int) -> Verification:
        state = decode_round.parts.slots
        request_ids = {sequence.slot: sequence.request.request_id for sequence in self._scheduler.running}
        kv_lens, drafts = state.kv_lens[slots].tolist(), decode_round.waiting_drafts(slots)
        for slot, kv_len, tokens in zip(slots, kv_lens, drafts, strict=True):
            self.drafts[request_ids[slot], kv_len] = tuple(tokens)
        return self._graph.run(decode_round, slots, max_kv_len)


def rounds_of(
    subject: Subject, records: Sequence[RequestRecord], drafts: DraftsByRound | None = None
) -> list[LoopRound]:
    """Return the rounds whose drafts were made in the loop, if the target's own text can judge all K of them.

    A request's first round is left out, since the prompt pass makes its drafts.
    """
    found = []
    for text, (record, plain) in enumerate(zip(records, subject.plain, strict=True)):
        start = len(record.prompt_ids)
        num_same = first_difference(record.output_ids, plain.output_ids)
        done = 0
        for accepted, emitted in zip(record.accepted_per_round, record.emitted_per_round, strict=True):
            # The output's token `done` is pending at this round's start; its drafts are the next K.
            if done > 0 and done + subject.num_draft_tokens < num_same:
                tokens = () if drafts is None else drafts[record.request_id, start + done][: subject.num_draft_tokens]
                found.append(LoopRound(text, start + done, accepted, tokens))
            done += emitted
    return found


def spread(rounds: Sequence[LoopRound], count: int) -> list[LoopRound]:
    """Return at most `count` of the rounds, evenly spaced and in order."""
    if len(rounds) <= count:
        return list(rounds)
    return [rounds[index * len(rounds) // count] for index in range(count)]
