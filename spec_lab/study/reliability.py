"""How well a drafter's confidences say what is accepted.

A confidence is the drafter's estimate of the probability that a draft and all before it are accepted. Runs with
`record.confidences=true` have them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from spec_lab.record.models import Request
from spec_lab.record.reading import Found
from spec_lab.study.compare import drafting
from spec_lab.study.figures import axes_of, legend, signed
from spec_lab.study.frame import EVERY_CATEGORY, frame, labels, own
from spec_lab.study.tables import Table, table_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_BINS = 10
NOTE = (
    "confidence, accepted: means over drafts. error: mean distance of confidence from the share accepted, over ten "
    "bins of equal width. AUC: chance that an accepted draft has a higher confidence than a rejected one. Where drafts "
    "are sampled, accepted may exceed confidence, which is of the likeliest token."
)


def judged_drafts(requests: Iterable[Request]) -> pd.DataFrame:
    """Return a row for each offered draft with a known confidence, up to the end of a text: its position (from 1), its
    confidence, and whether it and all before it were accepted."""
    rows = []
    for request in requests:
        counts = (request.accepted_per_round or (), request.judged_per_round or ())
        for confidences, accepted, judged in zip(request.confidence_per_round or (), *counts, strict=False):
            known = len(confidences) if judged > accepted else judged
            rows += [(request.category, k + 1, sure, k < accepted) for k, sure in enumerate(confidences[:known])]
    return pd.DataFrame(rows, columns=["category", "position", "confidence", "accepted"])


def calibration_error(said: Any, came_true: Any, num_bins: int = NUM_BINS) -> float:
    """Return the mean distance of the probabilities `said` from the frequencies of `came_true`, over bins of equal
    width."""
    confidences = np.asarray(said, dtype=float)
    bins = np.minimum((confidences * num_bins).astype(np.int64), num_bins - 1)
    apart = np.bincount(bins, weights=confidences - np.asarray(came_true))
    return float(np.abs(apart).sum() / len(confidences))


def chance_of_order(drafts: pd.DataFrame) -> float | None:
    """Return the area under the ROC curve; None if all drafts were accepted, or none. A pair of equal confidences
    counts one half (Mann and Whitney 1947)."""
    from scipy.stats import mannwhitneyu

    right, wrong = (drafts.loc[drafts["accepted"] == each, "confidence"] for each in (True, False))
    if right.empty or wrong.empty:
        return None
    return float(mannwhitneyu(right, wrong).statistic) / (len(right) * len(wrong))


def reliability_table(runs: Sequence[Found]) -> Table:
    """Return how reliable the confidences are: a row for each run and category that has some."""
    rows = own(frame(runs))
    rows = rows[rows["K"] > 0].assign(label=lambda rows: labels(rows))
    lines = []
    for row, found in zip(rows.to_dict("records"), drafting(runs), strict=True):
        drafts = judged_drafts(found.requests)
        for category, part in [*drafts.groupby("category"), (EVERY_CATEGORY, drafts)] if len(drafts) else []:
            error = calibration_error(part["confidence"], part["accepted"])
            numbers = {"drafts": len(part), "confidence": part["confidence"].mean(), "share": part["accepted"].mean()}
            lines.append({**row, **numbers, "category": category, "error": error, "auc": chance_of_order(part)})
    columns = {
        "run": "label", "category": "category", "drafts": "drafts", "confidence": "confidence", "accepted": "share",
        "error": "error", "AUC": "auc",
    }  # fmt: skip
    return table_of(pd.DataFrame(lines), columns, "Reliability of confidences", NOTE)


def reliability_figure(runs: Sequence[Found]) -> Figure:
    """Draw the share accepted over the confidence, by bins; on the diagonal confidences say the truth."""
    rows = own(frame(runs))
    names = labels(rows[rows["K"] > 0])
    with axes_of(width=5.5, height=4.6) as (figure, axes):
        axes.plot([0, 1], [0, 1], color="0.6", linewidth=1)
        for name, found in zip(names, drafting(runs), strict=True):
            drafts = judged_drafts(found.requests)
            if drafts.empty:
                continue
            bins = np.minimum((drafts["confidence"] * NUM_BINS).astype(int), NUM_BINS - 1)
            means = drafts.groupby(bins)[["confidence", "accepted"]].mean()
            axes.plot(means["confidence"], means["accepted"], "o-", label=name)
        axes.set(xlabel="confidence", ylabel="share accepted", xlim=(0, 1), ylim=(0, 1))
        legend(figure, axes)
    return signed(figure, rows)
