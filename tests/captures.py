"""Helpers that capture a function on the tape, and compare the tensors that come out of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spec_lab.core.trees import map_tensors
from spec_lab.engine.tape import TapeGraph, TapeRecorder


def flat(values: Any) -> list[torch.Tensor]:
    """Every tensor inside nested containers, in order."""
    found: list[torch.Tensor] = []
    map_tensors(values, lambda tensor: found.append(tensor) or tensor)
    return found


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Whether two lists hold equal tensors."""
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def capture(function: Callable[[], Any], num_warmups: int = 1) -> TapeGraph[Any]:
    """Record `function` on a tape, after it ran `num_warmups` times."""
    return TapeRecorder(num_warmups).capture(function)
