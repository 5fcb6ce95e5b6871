"""K by the number of running requests: the ranges of `drafter.k_schedule`. This module does not import torch.

The form is vLLM's (`num_speculative_tokens_per_batch_size`, #32374). Ranges are inclusive, and the first begins at 1. A
number between two ranges or after the last one has the K of the range before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KSchedule:
    """Ascending ranges [first batch size, last batch size, K]."""

    ranges: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, ranges: Sequence[Sequence[int]]) -> KSchedule:
        return cls(tuple((first, last, num_draft_tokens) for first, last, num_draft_tokens in ranges))

    @property
    def choices(self) -> tuple[int, ...]:
        """Return the distinct values of K, the largest first."""
        return tuple(sorted({num_draft_tokens for _, _, num_draft_tokens in self.ranges}, reverse=True))

    def k_of(self, num_requests: int) -> int:
        """Return the K of a round of `num_requests` requests."""
        return [num_draft_tokens for first, _, num_draft_tokens in self.ranges if first <= num_requests][-1]


def problem_of(ranges: Sequence[Sequence[int]], most: int) -> str | None:
    """Return what is wrong with `ranges`, such as "[1,0,3] ends before it begins"; None if they are valid."""
    if not ranges:
        return "there is no range"
    next_first = 1
    for number, entry in enumerate(ranges):
        shown = f"[{','.join(map(str, entry))}]"
        if len(entry) != 3:
            return f"{shown} must be three numbers: first batch size, last batch size, K"
        first, last, num_draft_tokens = entry
        if number == 0 and first != 1:
            return f"{shown} must begin at 1, the smallest batch size"
        if first < next_first:
            return f"{shown} must begin at {next_first} or later, since the range before it ends at {next_first - 1}"
        if last < first:
            return f"{shown} ends before it begins"
        if not 0 <= num_draft_tokens <= most:
            return f"{shown} has a K outside 0..{most}"
        next_first = last + 1
    if all(num_draft_tokens == 0 for _, _, num_draft_tokens in ranges):
        return "every K is 0"
    return None
