"""The host copies a round's results here."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from spec_lab.core.types import Verification


@dataclass(frozen=True, slots=True)
class RoundResult:
    """A round's verification as Python lists, a row a request.

    Attributes:
        relaxed: for each draft 1 or 0, whether it was accepted only because the rule relaxed; None for other rules.
        num_offered: drafts of the round that could have been accepted, of a tree those on the longest path; None where
            all could.
        num_offered_rows: drafts of a tree that could in all; None likewise, and of a chain.
        num_drafted: drafts that the round made for the next; None where the host knows without being told.
        distance: of each request total variation and KL, summed over the rows reached; None where the rule says none.
    """

    tokens: list[list[int]]
    num_emitted: list[int]
    relaxed: list[list[int]] | None
    num_offered: list[int] | None = None
    num_offered_rows: list[int] | None = None
    num_drafted: list[int] | None = None
    distance: list[list[float]] | None = None

    @property
    def num_rows(self) -> int:
        """N of the round: rows a request, of a tree those that can be on one path."""
        return len(self.tokens[0])

    def split(self, num_rounds: int) -> list[RoundResult]:
        """Return the results of each of `num_rounds` rounds, whose requests stand here one round after another."""
        if num_rounds == 1:
            return [self]
        batch_size = len(self.tokens) // num_rounds
        rows = [slice(start, start + batch_size) for start in range(0, len(self.tokens), batch_size)]
        columns: dict[str, Any] = {column.name: getattr(self, column.name) for column in fields(self)}
        parts: list[dict[str, Any]] = [
            {name: None if values is None else values[part] for name, values in columns.items()} for part in rows
        ]
        return [RoundResult(**part) for part in parts]


@dataclass(frozen=True, slots=True)
class PendingResult:
    """Results in one tensor, so that the host waits and copies once.

    Attributes:
        packed: [batch, N + 1] tokens and emitted count; a column more for each count that the round notes besides, two
            more for the bits of its distances, and K more where the rule says which drafts it relaxed for.
        num_tokens: N.
        counts: the names of the counts behind the emitted one.
        has_distance: whether the rule says how far from the target it emits.
        copied: recorded behind the copy into host memory; None where `packed` is read where it is.
    """

    packed: torch.Tensor
    num_tokens: int
    counts: tuple[str, ...] = ()
    has_distance: bool = False
    copied: torch.cuda.Event | None = None

    def read(self) -> RoundResult:
        """Wait until the results are there, and return them."""
        if self.copied is not None:
            self.copied.synchronize()
        rows = self.packed.tolist()
        num_tokens = self.num_tokens
        first_distance = num_tokens + 1 + len(self.counts)
        first_relaxed = first_distance + 2 * self.has_distance
        has_relaxed = self.packed.shape[1] > first_relaxed
        counts = {name: [row[place] for row in rows] for place, name in enumerate(self.counts, num_tokens + 1)}
        return RoundResult(
            tokens=[row[:num_tokens] for row in rows],
            num_emitted=[row[num_tokens] for row in rows],
            relaxed=[row[first_relaxed:] for row in rows] if has_relaxed else None,
            distance=[_floats(row[first_distance:first_relaxed]) for row in rows] if self.has_distance else None,
            **counts,
        )


def _floats(bits: list[int]) -> list[float]:
    """Read integers as the float64 numbers whose bits they are."""
    floats: list[float] = np.array(bits, dtype=np.int64).view(np.float64).tolist()
    return floats


def read_later(verification: Verification) -> PendingResult:
    """Begin a copy that the next replay cannot overwrite, and wait for nothing.

    Into pinned memory and with an event behind it: the host goes on as soon as the copy is there, and the round's work
    is all that it waits for.
    """
    pending = _pack(verification)
    packed = pending.packed
    if packed.device.type == "cpu":
        return pending
    pinned = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True).copy_(packed, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return replace(pending, packed=pinned, copied=copied)


def _pack(verification: Verification) -> PendingResult:
    """Copy the results into a tensor of their own, since the next replay rewrites the tensors they come from."""
    noted = {
        "num_offered": verification.num_offered,
        "num_offered_rows": verification.num_offered_rows,
        "num_drafted": verification.num_drafted,
    }
    counts = {name: count.unsqueeze(1) for name, count in noted.items() if count is not None}
    relaxed = [] if verification.relaxed is None else [verification.relaxed]
    # In the tokens' dtype, or the host would wait for two tensors.
    distance = [] if verification.distance is None else [verification.distance.double().view(torch.int64)]
    columns = [verification.tokens, verification.num_emitted.unsqueeze(1), *counts.values(), *distance, *relaxed]
    return PendingResult(torch.cat(columns, dim=1), verification.tokens.shape[1], tuple(counts), bool(distance))
