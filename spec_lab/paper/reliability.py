"""The tables of calibration: how often drafts are accepted, compared with the confidence that the drafter gave them.

A confidence is for a draft and all before it, as `drafter.stop` and `verify.budget` use it. So it is compared with
whether all of these were accepted. If a text ends among accepted drafts, drafts after its end are left out, as in
acceptance by position. Confidences in trees are not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import ArrayLike

from spec_lab.paper.provenance import NONE
from spec_lab.paper.runs import LineRuns, PaperRun, of_part
from spec_lab.paper.table import HEAT, LINE, TASK, PaperTable, TableColumn, TableRow, Value, table_of
from spec_lab.record.row_schema import RequestRow

NUM_BINS = 10
ALL = "all"
"""The task in the row of a line that has no confidences."""
DRAFTS = TableColumn("drafts", "drafts", 0)
CONFIDENCE = TableColumn("confidence", "confidence", 3)
ACCEPTED = TableColumn("accepted", "accepted", 3)
ERROR = TableColumn("error", "ECE", 3)
NOTE = (
    "Confidence: the drafter's estimate that a draft and all before it are accepted, which drafter.stop and "
    "verify.budget use. Accepted: share of the drafts that were accepted, with all before them."
)
ERROR_NOTE = (
    f"ECE, expected calibration error: over {NUM_BINS} bins of confidence, the mean distance between accepted and "
    "confidence, weighted by drafts."
)
NONE_NOTE = f"{NONE}: no confidence is recorded."


@dataclass(frozen=True, slots=True)
class JudgedDraft:
    """An offered draft. `position` counts from 1; `accepted` says whether it and all before it were accepted."""

    position: int
    confidence: float
    accepted: bool


def judged_drafts(rows: Iterable[RequestRow]) -> Iterator[JudgedDraft]:
    """Yield the offered drafts with a recorded confidence, up to the end of a text."""
    for row in rows:
        rounds = zip(
            row.get("confidence_per_round") or (), row["accepted_per_round"], row["judged_per_round"], strict=False
        )
        for confidences, num_accepted, num_judged in rounds:
            known = len(confidences) if num_judged > num_accepted else num_judged
            for place, confidence in enumerate(confidences[:known]):
                yield JudgedDraft(place + 1, confidence, place < num_accepted)


def reliability_table(runs: Sequence[PaperRun]) -> PaperTable:
    """Return a row for each line, temperature and task. A line without confidences has one row for all tasks. If no
    line has confidences there are no rows."""
    found = [(line, _by_task(line)) for line in of_part(runs, "acceptance")]
    rows = [
        line.row({"task": task, **_summed(drafts)})
        for line, tasks in found
        for task, drafts in (tasks if any(tasks.values()) else {ALL: []}).items()
    ]
    is_known = any(any(tasks.values()) for _, tasks in found)
    columns = [HEAT, LINE, TASK, DRAFTS, CONFIDENCE, ACCEPTED, ERROR, TableColumn("auc", "AUC", 3)]
    note = (
        f"{NOTE} {ERROR_NOTE} AUC: chance that an accepted draft has a higher confidence than a rejected one. "
        f"If drafts are sampled, accepted may exceed confidence, which is for the likeliest token. {NONE_NOTE}"
    )
    keys = ("temperature", "line", "task")
    return table_of("reliability", "Reliability of confidences", columns, keys, rows if is_known else [], note)


def bins_table(runs: Sequence[PaperRun]) -> PaperTable:
    """Return a row for each bin of confidence, for every line, temperature and task that has confidences."""
    rows = [row for line in of_part(runs, "acceptance") for row in _bin_rows(line)]
    columns = [HEAT, LINE, TASK, TableColumn("bin", "confidence from, to"), DRAFTS, CONFIDENCE, ACCEPTED]
    note = f"{NOTE} A column is a bin of confidence. The CSV has drafts and mean confidence of each."
    return table_of(
        "reliability_bins", "Share accepted by confidence", columns, ("temperature", "line", "task", "bin"), rows, note,
        across="bin", shown="accepted",
    )  # fmt: skip


def by_position(drafts: Sequence[JudgedDraft], position: int) -> dict[str, Value]:
    """Return mean confidence and calibration error of the drafts at a position: `NONE` without any drafts, None without
    drafts there."""
    if not drafts:
        return {"confidence": NONE, "error": NONE}
    here = [draft for draft in drafts if draft.position == position]
    return {"confidence": _mean(here, _confidence), "error": _error(here)}


def calibration_error(said: ArrayLike, came_true: ArrayLike, num_bins: int = NUM_BINS) -> float:
    """Return the mean distance of the probabilities `said` from the frequencies of `came_true`, over bins of equal
    width."""
    confidences = np.asarray(said)
    bins = np.minimum((confidences * num_bins).astype(np.int64), num_bins - 1)
    apart = np.bincount(bins, weights=confidences - np.asarray(came_true))
    return float(np.abs(apart).sum() / len(confidences))


def _error(drafts: Sequence[JudgedDraft]) -> float | None:
    return calibration_error([*map(_confidence, drafts)], [draft.accepted for draft in drafts]) if drafts else None


def chance_of_order(drafts: Sequence[JudgedDraft]) -> float | None:
    """Return the area under the ROC curve, by ranks; None if all drafts were accepted, or none.

    A pair of drafts with equal confidence counts one half (Mann and Whitney 1947).
    """
    accepted = np.array([draft.accepted for draft in drafts], dtype=bool)
    num_accepted, num_others = int(accepted.sum()), int((~accepted).sum())
    if num_accepted == 0 or num_others == 0:
        return None
    _, places, counts = np.unique([draft.confidence for draft in drafts], return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    above = float(ranks[accepted].sum()) - num_accepted * (num_accepted + 1) / 2
    return above / (num_accepted * num_others)


def _by_task(line: LineRuns) -> dict[str, list[JudgedDraft]]:
    return {task: list(judged_drafts(part.rows)) for task, part in line.of_tasks().items()}


def _summed(drafts: Sequence[JudgedDraft]) -> dict[str, Value]:
    if not drafts:
        return dict.fromkeys(("drafts", "confidence", "accepted", "error", "auc"), NONE)
    return {
        **_counted(drafts),
        "error": _error(drafts),
        "auc": chance_of_order(drafts),
    }


def _bin_rows(line: LineRuns) -> Iterator[TableRow]:
    for task, drafts in _by_task(line).items():
        for place, part in _bins(drafts).items() if drafts else ():
            ends = f"{place / NUM_BINS:.1f}-{(place + 1) / NUM_BINS:.1f}"
            yield line.row({"task": task, "bin": ends, **_counted(part)})


def _bins(drafts: Iterable[JudgedDraft]) -> Mapping[int, list[JudgedDraft]]:
    """Group drafts by confidence: bin b begins at b / NUM_BINS, and the last bin includes 1."""
    bins: dict[int, list[JudgedDraft]] = {place: [] for place in range(NUM_BINS)}
    for draft in drafts:
        bins[min(int(draft.confidence * NUM_BINS), NUM_BINS - 1)].append(draft)
    return bins


def _counted(drafts: Sequence[JudgedDraft]) -> dict[str, Value]:
    return {"drafts": len(drafts), "confidence": _mean(drafts, _confidence), "accepted": _mean(drafts, _accepted)}


def _mean(drafts: Sequence[JudgedDraft], of: Callable[[JudgedDraft], float]) -> float | None:
    return fmean(map(of, drafts)) if drafts else None


def _confidence(draft: JudgedDraft) -> float:
    return draft.confidence


def _accepted(draft: JudgedDraft) -> float:
    return float(draft.accepted)
