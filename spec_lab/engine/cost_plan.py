"""drafter.plan=cost: as many drafts as bring the most tokens a second, by measured costs and measured acceptance."""

from __future__ import annotations

from collections.abc import Sequence as List

import numpy as np

from spec_lab.core.types import Request, Sequence
from spec_lab.engine.costs import CostTable, Seconds
from spec_lab.engine.plan import OFF, Choice, Shape
from spec_lab.engine.rates import AcceptanceRates, Array, CalibratedConfidences, Integers

TRIALS = 0.008
"""The share of time that may be lost to trying numbers of drafts whose acceptance is not known."""
TRIAL_DRAFTS = 4
"""How many drafts at the tried position a trial is to judge."""
UNKNOWN_BELOW = 1.0
"""A position is tried if fewer drafts than this count there for some request."""
RESUME_ROUNDS = 32
"""The rounds over which the drafter's way back has to pay."""
WORTH_A_CHANGE = 1.02


class CostPlan:
    """Chooses the K of most tokens a second over the batch, plain decoding included.

    A K that nobody has tried lately is tried if that costs little: a share of the time so far may be lost to trials.
    With confidences, the waiting drafts that cost more than they bring are left out.
    """

    needs_costs = True

    def __init__(self, num_slots: int, num_draft_tokens: int) -> None:
        self.costs: CostTable | None = None
        self._most = num_draft_tokens
        self._rates = AcceptanceRates(num_slots, num_draft_tokens)
        self._confidences = CalibratedConfidences()
        self._own_most: Integers = np.full(num_slots, num_draft_tokens)
        self._columns = np.arange(num_draft_tokens)
        self.restart()

    def restart(self) -> None:
        self._rates.restart()
        self._confidences.restart()
        self._k = self._most
        self._allowance = 0.0
        self._trial: tuple[int, int] = 0, 0  # the K that is tried, and the rounds that are left

    def admit(self, slot: int, request: Request) -> None:
        own = request.num_draft_tokens
        self._rates.admit(slot)
        self._own_most[slot] = self._most if own is None else own

    def choose(self, sequences: List[Sequence]) -> Choice:
        assert self.costs is not None
        count = len(sequences)
        slots = np.array([sequence.slot for sequence in sequences])
        rates = self._rates.of(slots)
        if self._own_most[slots].min() < self._most:
            rates = np.where(self._columns < self._own_most[slots][:, None], rates, 0.0)
        survival = rates.cumprod(axis=1)
        tokens = np.concatenate(((count,), count + survival.sum(axis=0).cumsum()))
        seconds = self._steady_seconds(self.costs, count)
        is_behind = any(sequence.num_missed for sequence in sequences)
        best, worth = self._best(tokens, seconds, count, is_behind)
        self._k = self._with_trial(best, worth, seconds, slots, count, is_behind)
        if self._k == 0 or is_behind:
            shape, num_tokens = Shape(0, self._k), float(count)
        else:
            shape, num_tokens = self._worth_verifying(sequences, rates, survival, worth[best])
        self._allowance += TRIALS * self.costs.seconds(count, shape)
        return Choice(shape, num_tokens)

    def note(self, sequences: List[Sequence]) -> None:
        slots = np.array([sequence.slot for sequence in sequences])
        offered = np.array([sequence.offered_per_round[-1] for sequence in sequences])
        accepted = np.array([sequence.accepted_per_round[-1] for sequence in sequences])
        self._rates.note(slots, offered, accepted)
        confidences = [sequence.confidence_per_round[-1] for sequence in sequences]
        if any(confidences):
            width = int(offered.max())
            padded = np.array([[*row, *[1.0] * (width - len(row))] for row in confidences])
            self._confidences.note(padded, offered, accepted)

    def _steady_seconds(self, costs: CostTable, count: int) -> Seconds:
        """Return the time [K + 1] of a round if all rounds have that K. Without drafts, the catch-up is shared by the
        rounds that the drafter misses."""
        seconds = costs.verified[count] + costs.draft[count] * np.maximum(np.arange(self._most + 1) - 1, 0)
        catch_up = max(costs.verified[count, 0] - costs.plain[count], 0.0)
        seconds[0] = costs.plain[count] + catch_up / costs.missed_size
        return seconds

    def _best(self, tokens: Array, seconds: Seconds, count: int, is_behind: bool) -> tuple[int, Array]:
        """Return the best K, and the tokens a second of each."""
        way_back = np.zeros(self._most + 1)
        if is_behind:
            assert self.costs is not None
            way_back[1:] = max(self.costs.verified[count, 0] - self.costs.plain[count], 0.0) / RESUME_ROUNDS
        worth = tokens / (seconds + way_back)
        best = int(worth.argmax())
        return (self._k if worth[best] < WORTH_A_CHANGE * worth[self._k] else best), worth

    def _with_trial(
        self, best: int, worth: Array, seconds: Seconds, slots: Integers, count: int, is_behind: bool
    ) -> int:
        """Return the K of this round: the best one, or a larger one that is tried."""
        assert self.costs is not None
        tried, left = self._trial
        if left:
            self._trial = tried, left - 1
            return max(tried, best)
        if best == self._most:
            return best
        larger = best + 1 if best else 1 + int(worth[1:].argmax())
        if self._rates.num_judged(slots, larger - 1) >= UNKNOWN_BELOW:
            return best
        num_rounds = -(-TRIAL_DRAFTS // count)
        loss = num_rounds * seconds[larger] * max(1.0 - worth[larger] / worth[best], 0.0)
        if is_behind:
            loss += max(self.costs.verified[count, 0] - self.costs.plain[count], 0.0)
        if loss > self._allowance:
            return best
        self._allowance -= loss
        self._trial = larger, num_rounds  # what one round drafts, the next one judges
        return larger

    def _worth_verifying(
        self, sequences: List[Sequence], rates: Array, survival: Array, tokens_a_second: float
    ) -> tuple[Shape, float]:
        """Leave out the waiting drafts that cost more than they bring, by rates or by the drafter's confidence."""
        assert self.costs is not None
        waiting = np.array([sequence.num_waiting for sequence in sequences])
        if all(sequence.waiting_confidences for sequence in sequences):
            known = np.zeros_like(rates)
            for row, sequence in zip(known, sequences, strict=True):
                row[: sequence.num_waiting] = (sequence.waiting_confidences or [])[: sequence.num_waiting]
            survival = self._confidences.survival(known, rates)
        survival = np.where(self._columns < waiting[:, None], survival, 0.0)
        tokens = len(sequences) + survival.sum(axis=0).cumsum()
        gain = tokens - tokens_a_second * self.costs.verified[len(sequences), 1:]
        best = int(gain[: max(int(waiting.max()), 1)].argmax())
        return Shape(best + 1, self._k), float(tokens[best])
