"""The host's copy of a round's results."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_lab.core.types import Verification


@dataclass(frozen=True, slots=True)
class RoundResult:
    """A round's verification as Python lists, a row a request.

    Attributes:
        relaxed: for each draft 1 or 0, whether it was accepted only because the rule relaxed; None for other rules.
    """

    tokens: list[list[int]]
    num_emitted: list[int]
    relaxed: list[list[int]] | None


@dataclass(frozen=True, slots=True)
class PendingResult:
    """Results in one tensor, so that the host waits and copies once.

    Attributes:
        packed: [batch, N + 1] tokens and emitted count; K columns more where the rule says which drafts it relaxed for.
        num_tokens: N.
        copied: recorded behind the copy into host memory; None where `packed` is read where it is.
    """

    packed: torch.Tensor
    num_tokens: int
    copied: torch.cuda.Event | None = None

    def read(self) -> RoundResult:
        """Waits until the results are there."""
        if self.copied is not None:
            self.copied.synchronize()
        rows = self.packed.tolist()
        num_tokens = self.num_tokens
        has_relaxed = self.packed.shape[1] > num_tokens + 1
        return RoundResult(
            tokens=[row[:num_tokens] for row in rows],
            num_emitted=[row[num_tokens] for row in rows],
            relaxed=[row[num_tokens + 1 :] for row in rows] if has_relaxed else None,
        )


def read_now(verification: Verification) -> PendingResult:
    """Return results that have to be read before the next round is launched: reading them waits for the device."""
    return PendingResult(_pack(verification), verification.tokens.shape[1])


def read_later(verification: Verification) -> PendingResult:
    """Begin a copy that the next replay cannot overwrite, and wait for nothing."""
    packed, num_tokens = _pack(verification), verification.tokens.shape[1]
    if packed.device.type == "cpu":
        return PendingResult(packed, num_tokens)
    pinned = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True).copy_(packed, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return PendingResult(pinned, num_tokens, copied)


def _pack(verification: Verification) -> torch.Tensor:
    """Copy the results into a tensor of their own, since the next replay rewrites the tensors they come from."""
    parts = [verification.tokens, verification.num_emitted.unsqueeze(1), verification.relaxed]
    return torch.cat([part for part in parts if part is not None], dim=1)
