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
        confidences: of each draft, as `Verification` has them; None where nobody reads them.
    """

    tokens: list[list[int]]
    num_emitted: list[int]
    relaxed: list[list[int]] | None = None
    num_offered: list[int] | None = None
    num_offered_rows: list[int] | None = None
    num_drafted: list[int] | None = None
    distance: list[list[float]] | None = None
    confidences: list[list[float]] | None = None

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


RESULTS = tuple(column.name for column in fields(RoundResult))
"""The fields of a verification that the host reads."""


@dataclass(frozen=True, slots=True)
class _Columns:
    """The place of a field of `RoundResult` among the columns of a packed result.

    `width`: how many it has; None for one number a request. `has_floats`: they are the bits of float64 numbers.
    """

    name: str
    width: int | None
    has_floats: bool


@dataclass(frozen=True, slots=True)
class PendingResult:
    """Results in one tensor, so that the host waits and copies once.

    Attributes:
        packed: [batch, columns] what `columns` say, in their order.
        copied: recorded behind the copy into host memory; None where `packed` is read where it is.
    """

    packed: torch.Tensor
    columns: tuple[_Columns, ...]
    copied: torch.cuda.Event | None = None

    def read(self) -> RoundResult:
        """Wait until the results are there, and return them."""
        if self.copied is not None:
            self.copied.synchronize()
        rows = self.packed.tolist()
        values: dict[str, Any] = {}
        first = 0
        for part in self.columns:
            end = first + (1 if part.width is None else part.width)
            if part.width is None:
                values[part.name] = [row[first] for row in rows]
            else:
                values[part.name] = [_floats(row[first:end]) if part.has_floats else row[first:end] for row in rows]
            first = end
        return RoundResult(**values)


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
    parts: list[torch.Tensor] = []
    columns: list[_Columns] = []
    for name in RESULTS:
        values: torch.Tensor | None = getattr(verification, name)
        if values is None or values.shape[1:].numel() == 0:
            continue
        columns.append(_Columns(name, None if values.dim() == 1 else values.shape[1], values.is_floating_point()))
        # In the tokens' dtype, or the host would wait for two tensors.
        values = values.double().view(torch.int64) if values.is_floating_point() else values
        parts.append(values.unsqueeze(1) if values.dim() == 1 else values)
    return PendingResult(torch.cat(parts, dim=1), tuple(columns))
