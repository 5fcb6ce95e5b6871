"""Seeded percentile bootstrap over prompts, of acceptance lengths and of their difference between two runs.

It resamples requests rather than rounds, since the rounds of one text are correlated. Two runs over the same prompts
are resampled together, so that a prompt's difficulty cancels out in their difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spec_lab.record.draft_counts import DraftCounts
from spec_lab.record.row_schema import RequestRow

if TYPE_CHECKING:
    import numpy as np

    Counts = np.ndarray[Any, Any]

NUM_RESAMPLES = 2000
SEED = 0
PERCENTILES = (2.5, 97.5)
LEAST_PROMPTS = 2
"""With one prompt all resamples are equal, and the interval would have no width."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95 % interval, whose ends are None if there is only one prompt, or a task has only one."""

    value: float
    low: float | None
    high: float | None

    @property
    def holds_zero(self) -> bool:
        """Return whether the interval includes 0; true if it has no ends."""
        return self.low is None or self.high is None or self.low <= 0 <= self.high


def bootstrap_acceptance_length(rows: Sequence[RequestRow], num_draft_tokens: int) -> Interval | None:
    """Return pooled acceptance length with its 95 % percentile interval; None if too few drafts were judged."""
    if not rows:
        return None
    return _interval(*_pooled_and_resampled(rows, num_draft_tokens, _times_picked(len(rows), SEED)), len(rows))


def bootstrap_difference(
    rows: Sequence[RequestRow],
    num_draft_tokens: int,
    base_rows: Sequence[RequestRow],
    base_num_draft_tokens: int,
    paired: bool = True,
) -> Interval | None:
    """Return acceptance length minus that of a base run, with its 95 % percentile interval; None if too few drafts were
    judged.

    Args:
        paired: whether both have the same prompts in the same order, and are to be resampled together.
    """
    assert not paired or [row["id"] for row in rows] == [row["id"] for row in base_rows]
    if not rows or not base_rows:
        return None
    picks = _times_picked(len(rows), SEED)
    base_picks = picks if paired else _times_picked(len(base_rows), SEED + 1)
    pooled, resampled = _pooled_and_resampled(rows, num_draft_tokens, picks)
    base_pooled, base_resampled = _pooled_and_resampled(base_rows, base_num_draft_tokens, base_picks)
    return _interval(pooled - base_pooled, resampled - base_resampled, min(len(rows), len(base_rows)))


@dataclass(frozen=True, slots=True)
class TaskRows:
    """The requests of one task in one configuration, with that configuration's K."""

    rows: Sequence[RequestRow]
    num_draft_tokens: int


def bootstrap_mean(tasks: Sequence[TaskRows], base: Sequence[TaskRows] = ()) -> Interval | None:
    """Return the mean over tasks of the pooled acceptance lengths, minus that of `base` if given, with its 95 %
    percentile interval; None if too few drafts were judged. Prompts are drawn within each task.

    Args:
        base: the same tasks with the same prompts in the same order; both are resampled together.
    """

    assert not base or [[row["id"] for row in task.rows] for task in tasks] == [
        [row["id"] for row in task.rows] for task in base
    ]
    if not tasks or not all(task.rows for task in tasks):
        return None
    picks = [_times_picked(len(task.rows), SEED + place) for place, task in enumerate(tasks)]
    value, resampled = _mean_over_tasks(tasks, picks)
    if base:
        base_value, base_resampled = _mean_over_tasks(base, picks)
        value, resampled = value - base_value, resampled - base_resampled
    return _interval(value, resampled, min(len(task.rows) for task in tasks))


def _mean_over_tasks(tasks: Sequence[TaskRows], picks: Sequence[Counts]) -> tuple[float, Counts]:
    import numpy as np

    found = [
        _pooled_and_resampled(task.rows, task.num_draft_tokens, picked)
        for task, picked in zip(tasks, picks, strict=True)
    ]
    return float(np.mean([pooled for pooled, _ in found])), np.mean([resampled for _, resampled in found], axis=0)


def _times_picked(count: int, seed: int) -> Counts:
    """Return how often each request is in each resample, [resamples, count]."""
    import numpy as np

    picks = np.random.default_rng(seed).integers(count, size=(NUM_RESAMPLES, count))
    return np.stack([np.bincount(part, minlength=count) for part in picks])


def _pooled_and_resampled(rows: Sequence[RequestRow], num_draft_tokens: int, picks: Counts) -> tuple[float, Counts]:
    """Return the pooled acceptance length, and that of each resample; NaN where too few drafts were judged."""
    import numpy as np

    counts = [
        DraftCounts.of(zip(row["accepted_per_round"], row["judged_per_round"], strict=True), num_draft_tokens)
        for row in rows
    ]
    reached, accepted = np.array([part.reached for part in counts]), np.array([part.accepted for part in counts])
    [pooled] = _acceptance_lengths(reached.sum(axis=0, keepdims=True), accepted.sum(axis=0, keepdims=True))
    return float(pooled), _acceptance_lengths(picks @ reached, picks @ accepted)


def _acceptance_lengths(reached: Counts, accepted: Counts) -> Counts:
    """Return the `acceptance_length` of many `DraftCounts` at once, of counts [number of them, K]; NaN where it is
    None."""
    import numpy as np

    rates = np.where(reached > 0, accepted / np.maximum(reached, 1), np.nan)
    shares = np.ones(len(rates))
    lengths = np.ones(len(rates))
    for rate in rates.T:
        shares = np.where(shares == 0, 0.0, shares * rate)
        lengths = lengths + shares
    return lengths


def _interval(value: float, resampled: Counts, num_prompts: int) -> Interval | None:
    import numpy as np

    if np.isnan(value) or np.isnan(resampled).all():
        return None
    if num_prompts < LEAST_PROMPTS:
        return Interval(float(value), None, None)
    low, high = np.nanpercentile(resampled, PERCENTILES)
    return Interval(float(value), float(low), float(high))
