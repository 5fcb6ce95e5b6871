"""Acceptance length as other tools count it, from the same rounds.

| tool | formula | the prompt pass's token |
|---|---|---|
| `specdec_bench` | mean chunk of a turn, then mean over turns; the end of sequence is cut off | a chunk of its own |
| `vllm` | 1 + accepted drafts / rounds, pooled; drafts behind an end of sequence count | not counted |
| `deepspec` | tokens up to and with the end of sequence / rounds, pooled; first turns alone | not counted |
| `aiperf` | 1 + accepted drafts / rounds of a request, then mean over requests | not counted |

Read in their sources (Model-Optimizer's examples/specdec_bench, vLLM's counters, DeepSpec's evaluator); AIPerf's as its
reference of metrics has it. `docs/paper.md` says how far each is from ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from spec_lab.record.row_schema import RequestRow

Length = Callable[[Sequence[RequestRow]], float | None]
LATER_TURN = "-turn"
ENDED = "eos"


def specdec_bench(rows: Sequence[RequestRow]) -> float | None:
    """Mean over turns of a turn's mean chunk, the prompt pass's token being one, and the end of sequence cut off."""
    chunks = [_chunks(row) for row in rows]
    return _mean([fmean(turn) for turn in chunks if turn])


def vllm(rows: Sequence[RequestRow]) -> float | None:
    """1 + accepted drafts over rounds, pooled over requests."""
    rounds = sum(len(row["accepted_per_round"]) for row in rows)
    return 1 + sum(sum(row["accepted_per_round"]) for row in rows) / rounds if rounds else None


def deepspec(rows: Sequence[RequestRow]) -> float | None:
    """Tokens that a round gives up to an end of sequence, over rounds, of first turns; a limit cuts nothing off."""
    judged = [count for row in rows if not _is_later_turn(row) for count in row["judged_per_round"]]
    return _mean(judged)


def aiperf(rows: Sequence[RequestRow]) -> float | None:
    """1 + accepted drafts over rounds of a request, averaged over requests."""
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
