"""How often drafts are accepted: by request and position, with a prior from all requests, and by confidence."""

from __future__ import annotations

import numpy as np

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Flags = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

FORGET_OWN, FORGET_ALL = 0.9, 0.995
"""What a count keeps of its weight with each round, of the request and of any."""
PRIOR_DRAFTS = 4.0
"""The drafts of its own for which the prior counts with each request."""
FIRST_RATE, FIRST_DRAFTS = 0.7, 2.0
"""The rate of every position before anything was seen, and the drafts for which it counts."""


class AcceptanceRates:
    """The share of drafts that are accepted where they are judged, by slot and position.

    Each count loses weight with time. So a request's rate returns to that of all requests while nothing is offered, and
    positions that nobody tries borrow the rate of the position before.
    """

    def __init__(self, num_slots: int, num_draft_tokens: int) -> None:
        self._own: Array = np.zeros((2, num_slots, num_draft_tokens))  # accepted, judged
        self._all: Array = np.zeros((2, num_draft_tokens))
        self.restart()

    def restart(self) -> None:
        """Forget everything."""
        self._own.fill(0.0)
        self._all.fill(0.0)
        self.renew_prior()

    def admit(self, slot: int) -> None:
        """Forget the last request of `slot`."""
        self._own[:, slot] = 0.0

    def note(self, slots: Integers, judged: Flags, passed: Flags) -> None:
        """Count rounds of the requests in `slots` [batch], oldest first: which drafts [rounds, batch, K] were judged,
        and which of these accepted."""
        num_rounds, batch, _ = judged.shape
        counts = np.stack((passed, judged), dtype=np.float64)
        weights = FORGET_OWN ** np.arange(num_rounds - 1, -1, -1)
        self._own[:, slots] *= FORGET_OWN**num_rounds
        self._own[:, slots] += np.tensordot(weights, counts, (0, 1))
        self._all *= FORGET_ALL ** (batch * judged.any(axis=1).sum(axis=0))
        self._all += counts.sum(axis=(1, 2))

    def of(self, slots: Integers) -> Array:
        """Return the rates [batch, K] of the requests in `slots` [batch]."""
        accepted, judged = self._own[:, slots]
        rates: Array = (accepted + PRIOR_DRAFTS * self.prior) / (judged + PRIOR_DRAFTS)
        return rates

    def num_judged(self, slots: Integers, position: int) -> float:
        """Return the weight of the drafts at `position`, from 0, of the request in `slots` that has the least."""
        return float(self._own[1, slots, position].min())

    def renew_prior(self) -> None:
        """Set the prior from all rounds that were noted."""
        rate, prior = FIRST_RATE, []
        for accepted, judged in self._all.T:
            rate = (accepted + FIRST_DRAFTS * rate) / (judged + FIRST_DRAFTS)
            prior.append(rate)
        self.prior: Array = np.array(prior)


class CalibratedConfidences:
    """The share of drafts that are accepted, by the drafter's confidence in them, in bins of equal width."""

    NUM_BINS = 10

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget everything; confidences then count as they are."""
        middle = (np.arange(self.NUM_BINS) + 0.5) / self.NUM_BINS
        self._counts: Array = FIRST_DRAFTS * np.stack((middle, np.ones(self.NUM_BINS)))
        self._mean = np.array([FIRST_RATE * FIRST_DRAFTS, FIRST_DRAFTS])

    def note(self, confidences: Array, judged: Flags, passed: Flags) -> None:
        """Count a round by the survival [batch, K] that the drafter expected; flags as in `AcceptanceRates.note`."""
        bins, right = self._bins(confidences)[judged], passed[judged]
        self._counts *= FORGET_ALL ** len(bins)
        self._mean *= FORGET_ALL ** len(bins)
        np.add.at(self._counts[0], bins, right)
        np.add.at(self._counts[1], bins, 1.0)
        self._mean += right.sum(), len(bins)

    def calibrate(self, rates: Array) -> None:
        """Set from all rounds that were noted what confidences are worth to requests of these `rates` [batch, K]: one
        that does better than others at the same confidence has its odds raised by as much as its rate is above that of
        all."""
        of_requests = _odds(rates) / _odds(self._mean[0] / self._mean[1])
        odds = of_requests[..., None] * _odds(self._counts[0] / self._counts[1])
        self._chances = odds / (1.0 + odds)  # [batch, K, bins], so that a launch only looks them up
        self._places = np.arange(rates.size).reshape(rates.shape) * self.NUM_BINS

    def survival(self, confidences: Array) -> Array:
        """Return how likely drafts and all before them are accepted [batch, drafts], from the survival that the drafter
        expects."""
        places = self._places[:, : confidences.shape[1]] + self._bins(confidences)
        survival: Array = self._chances.take(places).cumprod(axis=1)
        return survival

    def _bins(self, confidences: Array) -> Integers:
        """Return the bin of each draft's own confidence, given that all before it are accepted."""
        own = confidences.copy()
        own[:, 1:] /= np.maximum(confidences[:, :-1], 1e-9)
        bins: Integers = np.minimum(own * self.NUM_BINS, self.NUM_BINS - 1).astype(np.int64)
        return bins


def _odds(rate: Array | np.floating) -> Array:
    clipped: Array = np.clip(rate, 0.01, 0.99)
    odds: Array = clipped / (1.0 - clipped)
    return odds
