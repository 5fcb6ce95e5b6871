"""Capturing on the tape, and comparing what comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spec_lab.core.trees import map_tensors
from spec_lab.engine.tape import TapeGraph, TapeRecorder


def flat(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(values, lambda tensor: found.append(tensor) or tensor)
    return found


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def capture(function: Callable[[], Any], num_warmups: int = 1) -> TapeGraph[Any]:
    return TapeRecorder(num_warmups).capture(function)
