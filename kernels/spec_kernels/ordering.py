"""Encodes scores and their places as integers, so that the next best score is one maximum, even with ties."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

TAKEN = tl.constexpr(-(1 << 63))
"""Replaces an entry that has been taken; it is lower than every encoded score."""


@triton.jit
def in_order(scores: tl.tensor, places: tl.tensor) -> tl.tensor:
    """Turn float32 scores into distinct integers of the same order; of equal scores the first place gets the
    highest."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0 and 0 are equal
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - places).to(tl.int64)


@triton.jit
def place_of(order: tl.tensor) -> tl.tensor:
    """Return the places encoded in such integers."""
    return 0x7FFFFFFF - (order & 0x7FFFFFFF)


@triton.jit
def score_of(order: tl.tensor) -> tl.tensor:
    """Return the scores encoded in such integers."""
    bits = (order >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
