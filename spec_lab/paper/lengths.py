"""Acceptance length as other tools count it, from the same rounds.

| tool | formula | the prompt pass's token |
|---|---|---|
| `specdec_bench` | mean chunk of a turn, then mean over turns; the end of sequence is cut off | a separate chunk |
| `vllm` | 1 + accepted drafts / rounds, pooled; drafts after an end of sequence count | not counted |
| `deepspec` | tokens up to and including the end of sequence / rounds, pooled; only first turns | not counted |
| `aiperf` | 1 + accepted drafts / rounds of a request, then mean over requests | not counted |

A chunk is the tokens that a round or the prompt pass emits.

Sources: Model-Optimizer's examples/specdec_bench, vLLM's counters, DeepSpec's evaluator, and AIPerf's documentation of
its metrics. `docs/paper.md` compares each with the lab's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from spec_lab.record.row_schema import RequestRow

Length = Callable[[Sequence[RequestRow]], float | None]
LATER_TURN = "-turn"
ENDED = "eos"


def specdec_bench(rows: Sequence[RequestRow]) -> float | None:
    """Return the mean over turns of a turn's mean chunk, without the end of sequence."""
    chunks = [_chunks(row) for row in rows]
    return _mean([fmean(turn) for turn in chunks if turn])


def vllm(rows: Sequence[RequestRow]) -> float | None:
    """Return 1 + accepted drafts / rounds, pooled over requests."""
    rounds = sum(len(row["accepted_per_round"]) for row in rows)
    return 1 + sum(sum(row["accepted_per_round"]) for row in rows) / rounds if rounds else None


def deepspec(rows: Sequence[RequestRow]) -> float | None:
    """Return the mean tokens of a round up to an end of sequence, over first turns, before any cut by a limit."""
    judged = [count for row in rows if not _is_later_turn(row) for count in row["judged_per_round"]]
    return _mean(judged)


def aiperf(rows: Sequence[RequestRow]) -> float | None:
    """Return the mean over requests of 1 + accepted drafts / rounds of the request."""
    return _mean([1 + fmean(row["accepted_per_round"]) for row in rows if row["accepted_per_round"]])


LENGTHS: Mapping[str, Length] = {
    "specdec_bench": specdec_bench,
    "vllm": vllm,
    "deepspec": deepspec,
    "aiperf": aiperf,
}


def _chunks(row: RequestRow) -> list[int]:
    chunks = [1, *row["emitted_per_round"]]
    if row["finish_reason"] == ENDED:
        chunks[-1] -= 1
    return [chunk for chunk in chunks if chunk]


def _is_later_turn(row: RequestRow) -> bool:
    _, turn, number = row["id"].rpartition(LATER_TURN)
    return bool(turn) and number.isdecimal()


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
