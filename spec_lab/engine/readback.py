"""Copies a round's results to the host."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from spec_lab.core.types import Verification


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The verification of one round, or of several joined: Python lists with an entry for each row, even a padded one.

    Attributes:
        relaxed: 1 for each draft that only the relaxed condition accepted, else 0; None for rules that do not relax,
            and in a round without drafts.
        num_offered: drafts of the round that could have been accepted; in a tree, the most on one path. None if all
            could.
        distance: total variation and KL of each request, summed over the rows reached; None if the rule has none.
        confidences, made_confidences, path: as in `Verification`; None if nothing reads them.
    """

    tokens: list[list[int]]
    num_emitted: list[int]
    relaxed: list[list[int]] | None = None
    num_offered: list[int] | None = None
    distance: list[list[float]] | None = None
    confidences: list[list[float]] | None = None
    made_confidences: list[list[float]] | None = None
    path: list[list[int]] | None = None

    @property
    def num_rows(self) -> int:
        """N of the round: rows for each request; for a tree, the most rows on one path."""
        return len(self.tokens[0])

    def split(self, num_rounds: int) -> list[RoundResult]:
        """Split the joined results of `num_rounds` rounds into those of each round."""
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
    """The columns of a packed result that hold a field of `RoundResult`.

    `width`: the number of columns; None for a single number. `has_floats`: they hold the bits of float64 numbers.
    """

    name: str
    width: int | None
    has_floats: bool


@dataclass(frozen=True, slots=True)
class PendingResult:
    """Results in one tensor, so that the host waits and copies once.

    Attributes:
        packed: [batch, columns] the fields that `columns` lists, in that order.
        copied: an event recorded after the copy to host memory; None if `packed` is read directly.
    """

    packed: torch.Tensor
    columns: tuple[_Columns, ...]
    copied: torch.cuda.Event | None = None

    def read(self) -> RoundResult:
        """Wait for the results, and return them."""
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
                values[part.name] = [
                    np.array(row[first:end]).view(np.float64).tolist() if part.has_floats else row[first:end]
                    for row in rows
                ]
            first = end
        return RoundResult(**values)


def read_later(verification: Verification) -> PendingResult:
    """Begin a copy of the results. The next replay cannot overwrite this copy.

    From a GPU the copy is asynchronous. It goes to pinned memory, followed by an event. So the host later waits for
    this round's work and for nothing launched after it.
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
    """Copy the results into a new tensor, since the next replay overwrites the tensors they come from."""
    parts: list[torch.Tensor] = []
    columns: list[_Columns] = []
    for name in RESULTS:
        values: torch.Tensor | None = getattr(verification, name)
        if values is None or values.shape[1:].numel() == 0:
            continue
        columns.append(_Columns(name, None if values.dim() == 1 else values.shape[1], values.is_floating_point()))
        # All fields share the tokens' dtype, so that there is one tensor to copy.
        values = values.double().view(torch.int64) if values.is_floating_point() else values
        parts.append(values.unsqueeze(1) if values.dim() == 1 else values)
    return PendingResult(torch.cat(parts, dim=1), tuple(columns))
