"""The host copies a round's results here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_lab.core.types import Verification


@dataclass(frozen=True, slots=True)
class RoundResult:
    """Holds a round's verification as Python lists, a row a request.

    Attributes:
        relaxed: for each draft 1 or 0, whether it was accepted only because the rule relaxed; None for other rules.
        num_offered: drafts of the round that could have been accepted; None where all could.
    """

    tokens: list[list[int]]
    num_emitted: list[int]
    relaxed: list[list[int]] | None
    num_offered: list[int] | None = None

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
        return [
            RoundResult(
                self.tokens[part],
                self.num_emitted[part],
                None if self.relaxed is None else self.relaxed[part],
                None if self.num_offered is None else self.num_offered[part],
            )
            for part in rows
        ]


@dataclass(frozen=True, slots=True)
class PendingResult:
    """Holds results in one tensor, so that the host waits and copies once.

    Attributes:
        packed: [batch, N + 1] tokens and emitted count; a column more where the round says how many drafts were
            offered, and K more where the rule says which drafts it relaxed for.
        num_tokens: N.
        copied: recorded behind the copy into host memory; None where `packed` is read where it is.
        has_offered: there is the column of offered drafts.
    """

    packed: torch.Tensor
    num_tokens: int
    copied: torch.cuda.Event | None = None
    has_offered: bool = False

    def read(self) -> RoundResult:
        """Wait until the results are there, and return them."""
        if self.copied is not None:
            self.copied.synchronize()
        rows = self.packed.tolist()
        num_tokens = self.num_tokens
        num_counts = num_tokens + 1 + self.has_offered
        has_relaxed = self.packed.shape[1] > num_counts
        return RoundResult(
            tokens=[row[:num_tokens] for row in rows],
            num_emitted=[row[num_tokens] for row in rows],
            relaxed=[row[num_counts:] for row in rows] if has_relaxed else None,
            num_offered=[row[num_tokens + 1] for row in rows] if self.has_offered else None,
        )


def read_later(verification: Verification) -> PendingResult:
    """Begin a copy that the next replay cannot overwrite, and wait for nothing.

    Into pinned memory and with an event behind it: the host goes on as soon as the copy is there, and the round's work
    is all that it waits for.
    """
    packed, num_tokens = _pack(verification), verification.tokens.shape[1]
    has_offered = verification.num_offered is not None
    if packed.device.type == "cpu":
        return PendingResult(packed, num_tokens, has_offered=has_offered)
    pinned = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True).copy_(packed, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return PendingResult(pinned, num_tokens, copied, has_offered)


def _pack(verification: Verification) -> torch.Tensor:
    """Copy the results into a tensor of their own, since the next replay rewrites the tensors they come from."""
    offered = None if verification.num_offered is None else verification.num_offered.unsqueeze(1)
    parts = [verification.tokens, verification.num_emitted.unsqueeze(1), offered, verification.relaxed]
    return torch.cat([part for part in parts if part is not None], dim=1)
