"""drafter.plan=cost: as many drafts as bring the most tokens a second, by measured costs and measured acceptance."""

from __future__ import annotations

from collections.abc import Sequence as List
from itertools import chain

import numpy as np

from spec_lab.core.types import Request, Sequence
from spec_lab.engine.costs import CostDrift, Seconds
from spec_lab.engine.judged import JudgedDrafts
from spec_lab.engine.plan import OFF, LaunchShape, Plan, PlannedLaunch
from spec_lab.engine.rates import AcceptanceRates, Array, CalibratedConfidences, Integers

REVIEW_ROUNDS = 8
"""K is chosen for so many rounds, or until other requests run."""
TRIALS = 0.008
"""The share of time that may be lost to trying numbers of drafts whose acceptance is not known."""
UNKNOWN_BELOW = 1.0
"""A position is tried if fewer drafts than this count there for some request."""
RESUME_ROUNDS = 32
"""The rounds over which the drafter's way back has to pay."""
WORTH_A_CHANGE = 1.02


class CostPlan(Plan):
    """Chooses the K of most tokens a second over the batch, plain decoding included.

    A K that nobody has tried lately is tried if that costs little: a share of the time so far may be lost to trials.
    Waiting drafts that cost more than they bring are left out, if the drafter's confidences are known.
    """

    needs_costs = resumes = True

    def __init__(self, num_slots: int, drafts: JudgedDrafts, reads_confidences: bool = False) -> None:
        self._drafts = drafts
        self._reads_confidences = reads_confidences
        self._most = drafts.num_drafts
        self._rates = AcceptanceRates(num_slots, self._most)
        self._confidences = CalibratedConfidences()
        self._drift = CostDrift(num_slots, self._most)
        self._own_most: Integers = np.full(num_slots, self._most)
        self._columns = np.arange(self._most)
        self.restart()

    def restart(self) -> None:
        self._rates.restart()
        self._confidences.restart()
        self._drift.restart()
        self._allowance = 0.0
        self._k = self._most
        self._slots: list[int] = []
        self._admitted: list[int] = []
        self._noted_slots: list[int] = []
        self._noted: list[list[tuple[int, ...]]] = []

    def admit(self, slot: int, request: Request) -> None:
        own = request.num_draft_tokens
        self._own_most[slot] = self._most if own is None else own
        self._admitted.append(slot)

    def choose(self, sequences: List[Sequence]) -> PlannedLaunch:
        """A request that has just come is treated like the others of its first launch: the device is not to wait for a
        review."""
        assert self.costs is not None
        if not self._slots:
            self.review(sequences)
        count = len(sequences)
        is_behind = any(sequence.num_missed for sequence in sequences)
        confidences = [sure for sequence in sequences if (sure := sequence.waiting_confidences)]
        if self._k == 0 or is_behind:
            shape, num_tokens = LaunchShape(0, self._k), float(count)
        elif len(confidences) == count and not self._is_trial and self._is_reviewed(sequences):
            known = self._confidences.survival(_rows_of(confidences))
            shape, num_tokens = self._worth_verifying(known, sequences)
        else:
            shape, num_tokens = self._steady, float(self._tokens[self._k]) * count / len(self._slots)
        self._allowance += TRIALS * self.costs.seconds(count, shape)
        return PlannedLaunch(shape, num_tokens)

    def review(self, sequences: List[Sequence]) -> None:
        """Choose K for the next rounds, if it is time or other requests run."""
        if len(self._noted) >= REVIEW_ROUNDS or not self._is_reviewed(sequences):
            self._learn()
            for slot in self._admitted:
                self._rates.admit(slot)
            self._admitted.clear()
            slots = [sequence.slot for sequence in sequences]
            self._choose_k(slots, any(sequence.num_missed for sequence in sequences))

    def _is_reviewed(self, sequences: List[Sequence]) -> bool:
        """Return whether K was chosen for these requests."""
        return not self._admitted and [sequence.slot for sequence in sequences] == self._slots

    def note(self, sequences: List[Sequence], shape: LaunchShape, seconds: float | None) -> None:
        assert self.costs is not None
        if seconds is not None and (shape.num_offered or shape == OFF):
            count = len(sequences)
            self._drift.note(count, shape.num_offered, seconds / self.costs.seconds(count, shape))
        slots = [sequence.slot for sequence in sequences]
        if slots != self._noted_slots:
            self._learn()
            self._noted_slots = slots
        self._noted.append([self._drafts.outcome(sequence) for sequence in sequences])
        confidences = [sequence.confidence_per_round[-1] for sequence in sequences]
        if any(confidences):
            padded = [[*row, *[1.0] * (self._most - len(row))] for row in confidences]
            self._confidences.note(_rows_of(padded), *self._drafts.flags(np.array(self._noted[-1])))

    def _learn(self) -> None:
        """Count the rounds that were noted."""
        if self._noted:
            self._rates.note(np.array(self._noted_slots), *self._drafts.flags(np.array(self._noted)))
            self._rates.renew_prior()
            self._noted.clear()

    def _choose_k(self, slots: list[int], is_behind: bool) -> None:
        """Choose K for the next rounds of the requests in `slots`."""
        assert self.costs is not None
        self._slots = slots
        ids, count = np.array(slots), len(slots)
        self._own_rates = self._rates.of(ids)
        if self._own_most[ids].min() < self._most:
            self._own_rates = np.where(self._columns < self._own_most[ids][:, None], self._own_rates, 0.0)
        self._tokens = self._drafts.tokens(self._own_rates)
        self._ratios = self._drift.of(count)
        seconds = self.costs.steady(count) * self._ratios
        way_back = self.costs.catch_up(count) if is_behind else 0.0
        seconds[1:] += way_back / RESUME_ROUNDS
        worth = self._tokens / seconds
        best = self._best_of(self._drafts.counts, worth)
        best = self._k if worth[best] < WORTH_A_CHANGE * worth[self._k] else best
        self._worth = float(worth[best])
        self._k = self._tried(best, worth, seconds, ids, way_back)
        self._is_trial = self._k != best
        self._steady = LaunchShape(self._k, self._k)
        if self._reads_confidences:
            self._confidences.calibrate(self._own_rates)
            self._least = self._least_worth()

    def _tried(self, best: int, worth: Array, seconds: Seconds, ids: Integers, way_back: float) -> int:
        """Return a K that is larger than the best one and unknown, if a trial may cost so much; else the best one."""
        if best == self._most:
            return best
        above = self._drafts.counts[self._drafts.counts > best]
        larger = int(above[0]) if best else self._best_of(above, worth)
        ids = ids[self._own_most[ids] >= larger]
        if not len(ids) or self._rates.num_judged(ids, larger - 1) >= UNKNOWN_BELOW:
            return best
        loss = REVIEW_ROUNDS * float(seconds[larger]) * max(1.0 - float(worth[larger] / worth[best]), 0.0) + way_back
        if loss > self._allowance:
            return best
        self._allowance -= loss
        return larger

    def _least_worth(self) -> Array:
        """Return how many requests [K] must be expected to accept a draft, by its position, for it to be verified.

        A further row may cost less than the row before it. So a draft is worth the cheapest way on, with the tokens
        that drafts behind it usually bring.
        """
        assert self.costs is not None
        seconds, rates = self.costs.verified[len(self._slots)] * self._ratios, self._own_rates.mean(axis=0)
        least = []
        for draft in range(self._most):
            brought = np.concatenate(((1.0,), rates[draft + 1 :].cumprod())).cumsum()
            least.append(self._worth * float(((seconds[draft + 1 :] - seconds[draft]) / brought).min()))
        return np.array(least)

    def _worth_verifying(self, survival: Array, sequences: List[Sequence]) -> tuple[LaunchShape, float]:
        """Leave out the waiting drafts that cost more than they bring, by their `survival` [batch, drafts].

        A draft is left out by what is known of it and of those before it: the survival behind it depends on its token.
        """
        waiting = [sequence.num_waiting for sequence in sequences]
        most = max(*waiting, 1)
        survival = survival[:, :most]
        if min(waiting) < most:
            survival = np.where(self._columns[:most] < np.array(waiting)[:, None], survival, 0.0)
        accepted = survival.sum(axis=0)
        count = int(np.logical_and.accumulate(accepted > self._least[:most]).sum())
        return LaunchShape(count, self._k), len(sequences) + float(accepted[:count].sum())

    def _best_of(self, counts: Integers, gain: Array) -> int:
        """Return which of `counts` gains most; `gain` is by the number of drafts."""
        return int(counts[gain[counts].argmax()])


def _rows_of(rows: List[List[float]]) -> Array:
    """Return rows of one length as an array; `np.array` takes four times as long."""
    flat: Array = np.fromiter(chain.from_iterable(rows), float, len(rows) * len(rows[0]))
    return flat.reshape(len(rows), -1)
