"""Acceptance length as other tools count it, from the same rounds.

| tool | formula | the prompt pass's token |
|---|---|---|
| `specdec_bench` | mean chunk of a turn, then mean over turns; the end of sequence is cut off | a separate chunk |
| `vllm` | 1 + accepted drafts / rounds, pooled; drafts after an end of sequence count | not counted |
| `deepspec` | tokens up to and including the end of sequence / rounds, pooled; only first turns | not counted |
| `aiperf` | 1 + accepted drafts / rounds of a request, then mean over requests | not counted |

A chunk is the tokens that a round or the prompt pass emits.

Sources: Model-Optimizer's examples/specdec_bench, vLLM's counters, DeepSpec's evaluator, and AIPerf's documentation of
its metrics. `docs/studies.md` compares each with the lab's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import pandas as pd

from spec_lab.record.draft_counts import rounds_of
from spec_lab.record.models import Request
from spec_lab.record.reading import Found
from spec_lab.study.compare import drafting
from spec_lab.study.frame import frame, labels, own
from spec_lab.study.tables import Table, table_of

Length = Callable[[Sequence[Request]], float | None]
ENDED = "eos"


def specdec_bench(rows: Sequence[Request]) -> float | None:
    """Return the mean over turns of a turn's mean chunk, without the end of sequence."""
    chunks = [_chunks(row) for row in rows]
    return _mean([fmean(turn) for turn in chunks if turn])


def vllm(rows: Sequence[Request]) -> float | None:
    """Return 1 + accepted drafts / rounds, pooled over requests."""
    accepted = [count for row in rows for count, _, _ in rounds_of(row)]
    return 1 + fmean(accepted) if accepted else None


def deepspec(rows: Sequence[Request]) -> float | None:
    """Return the mean tokens of a round up to an end of sequence, over first turns, before any cut by a limit."""
    judged = [count for row in rows if row.turn == 1 for _, count, _ in rounds_of(row)]
    return _mean(judged)


def aiperf(rows: Sequence[Request]) -> float | None:
    """Return the mean over requests of 1 + accepted drafts / rounds of the request."""
    each = [[count for count, _, _ in rounds_of(row)] for row in rows]
    return _mean([1 + fmean(accepted) for accepted in each if accepted])


LENGTHS: Mapping[str, Length] = {
    "specdec_bench": specdec_bench,
    "vllm": vllm,
    "deepspec": deepspec,
    "aiperf": aiperf,
}


def _chunks(row: Request) -> list[int]:
    chunks = [1, *(row.emitted_per_round or ())]
    if row.finish_reason == ENDED:
        chunks[-1] -= 1
    return [chunk for chunk in chunks if chunk]


def lengths_table(runs: Sequence[Found]) -> Table:
    """Return each run's acceptance length beside those that other tools would print for the same rounds."""
    rows = own(frame(runs))
    rows = rows[rows["K"] > 0].assign(label=lambda rows: labels(rows))
    counted = [{name: length(found.requests) for name, length in LENGTHS.items()} for found in drafting(runs)]
    rows = rows.reset_index(drop=True).join(pd.DataFrame(counted))
    columns = {"run": "label", "K": "K", "the lab": "acceptance_length", **{name: name for name in LENGTHS}}
    return table_of(
        rows, columns, "Acceptance length as other tools count it", "docs/acceptance_length.md compares them."
    )


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
