"""What rounds cost on this machine with this target: measured when the engine is made, a few shapes and batch sizes.

A round is timed as a whole, from its launch until its results are read. So the cost of a shape has everything in it:
verify, catch-up, draft steps, launches and the host. What was not timed is interpolated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spec_lab.engine.plan import OFF, LaunchShape

Seconds = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def timed_shapes(most: LaunchShape, makes_all: bool) -> list[LaunchShape]:
    """Return the shapes that are timed: those of rounds that all have one K, plain decoding, a catch-up, and a long
    draft. `makes_all`: a round that drafts makes all drafts."""
    few = most.num_made if makes_all else 1
    counts = {*range(1, min(most.num_offered, 8) + 1), (most.num_offered + 1) // 2, most.num_offered}
    # Kernels change with the number of rows, so few are left to interpolation.
    steady = [LaunchShape(count, max(count, few)) for count in sorted(counts)]
    shapes = [OFF, LaunchShape(0, few), *steady, LaunchShape(1, most.num_made)]
    return list(dict.fromkeys(shapes))


def timed_sizes(num_slots: int, padded_size: Callable[[int], int]) -> list[int]:
    """Return the batch sizes that are timed: powers of two, which are all that captured modes have, and the largest."""
    sizes = [2**power for power in range(num_slots.bit_length())]
    return sorted({padded_size(size) for size in (*sizes, num_slots)})


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds by the number of requests, 0..num_slots (entry 0 is unused), and by offered drafts.

    Attributes:
        verified: [num_slots + 1, K + 1] a round that verifies that many drafts, less the drafts that it makes after
            the first; entry 0 also lets the drafter catch up with what it missed.
        plain: [num_slots + 1] a round without the drafter.
        draft: [num_slots + 1] each further draft.
        timed: what was timed, by batch size and shape.
        missed_size: after so many rounds without the drafter it has to catch up.
    """

    verified: Seconds
    plain: Seconds
    draft: Seconds
    timed: Mapping[tuple[int, LaunchShape], float]
    missed_size: int

    @classmethod
    def of(
        cls,
        timed: Mapping[tuple[int, LaunchShape], float],
        num_slots: int,
        most: LaunchShape,
        missed_size: int,
        padded_size: Callable[[int], int] = lambda size: size,
    ) -> CostTable:
        """Interpolate what was timed, linearly in rows and in the padded batch size."""
        sizes = sorted({size for size, _ in timed})
        few = min(shape.num_made for _, shape in timed if shape.num_made)
        padded = [padded_size(max(count, 1)) for count in range(num_slots + 1)]

        def over_sizes(shape: LaunchShape) -> Seconds:
            return np.interp(padded, sizes, [timed[size, shape] for size in sizes])

        rows = sorted({shape.num_offered for _, shape in timed} - {0})
        counts = np.arange(most.num_offered + 1)
        known = np.stack([over_sizes(LaunchShape(count, max(count, few))) for count in rows])
        steady = np.stack([np.interp(counts, rows, known[:, size]) for size in range(num_slots + 1)])
        longer = over_sizes(LaunchShape(1, most.num_made)) - known[0]
        draft = np.maximum(longer, 0.0) / max(most.num_made - few, 1)
        verified = steady - np.outer(draft, np.maximum(counts - few, 0))
        verified[:, 0] = over_sizes(LaunchShape(0, few))
        return cls(verified, over_sizes(OFF), draft, timed, missed_size=missed_size)

    def catch_up(self, num_requests: int) -> float:
        """Return how much longer a round without drafts takes if the drafter catches up with what it missed."""
        return max(float(self.verified[num_requests, 0] - self.plain[num_requests]), 0.0)

    def steady(self, num_requests: int) -> Seconds:
        """Return the time [K + 1] of a round if all rounds have that K. Rounds without the drafter share its
        catch-up."""
        most = self.verified.shape[1] - 1
        seconds: Seconds = self.verified[num_requests] + self.draft[num_requests] * np.maximum(
            np.arange(most + 1) - 1, 0
        )
        seconds[0] = self.plain[num_requests] + self.catch_up(num_requests) / self.missed_size
        return seconds

    def seconds(self, num_requests: int, shape: LaunchShape) -> float:
        """Return how long a round takes."""
        if not shape.num_made:
            return float(self.plain[num_requests])
        further = self.draft[num_requests] * (shape.num_made - 1)
        return float(self.verified[num_requests, shape.num_offered] + further)


class CostDrift:
    """How much longer rounds take than was timed, by the drafts that they verify: text sends rows to other experts than
    random tokens do, and has other lengths.

    Numbers that no round had lately borrow from those beside them. So while all rounds have one K nothing changes
    between shapes.
    """

    FOLLOW, FORGET, MOST = 0.15, 0.005, 2.0

    def __init__(self, num_slots: int, num_drafts: int) -> None:
        self._counts = np.arange(num_drafts + 1)
        self._ratios = np.full((num_slots.bit_length() + 1, num_drafts + 1), np.nan)  # by power of two

    def restart(self) -> None:
        """Forget everything."""
        self._ratios.fill(np.nan)

    def of(self, num_requests: int) -> Seconds:
        """Return the ratios [K + 1]."""
        ratios = self._ratios[(num_requests - 1).bit_length()]
        [known] = np.nonzero(~np.isnan(ratios))
        return np.interp(self._counts, known, ratios[known]) if len(known) else np.ones(len(ratios))

    def note(self, num_requests: int, num_offered: int, ratio: float) -> None:
        """Count the time of a round over what was timed."""
        ratio = min(max(ratio, 1.0 / self.MOST), self.MOST)
        ratios = self._ratios[(num_requests - 1).bit_length()]
        if np.isnan(ratios[num_offered]):
            ratios[num_offered] = self.of(num_requests)[num_offered]
        ratios += self.FORGET * (ratio - ratios)
        ratios[num_offered] += self.FOLLOW * (ratio - ratios[num_offered])


def shortest_times(runs: Sequence[Callable[[], float]], seconds: float, most: int = 12) -> list[float]:
    """Return the shortest time of each of `runs`, which return how long they took: what else a machine does only adds
    to a time, and adds more to a longer run.

    They take turns while another one ends before `seconds` have passed in total, so that a machine that slows down
    slows down all of them. In its turn each runs three times, of which the first does not count: the run before it left
    cold caches, which rounds of one shape after another do not have.
    """
    times: list[list[float]] = [[] for _ in runs]
    spent, turns = 0.0, 0
    while not turns or (turns < most and spent * (turns + 1) / turns < seconds):
        for run, taken in zip(runs, times, strict=True):
            first, *counted = (run() for _ in range(3))
            taken.extend(counted)
            spent += first + sum(counted)
        turns += 1
    return [min(taken) for taken in times]
