"""Scores and their places as integers: the next best of some scores is then one maximum, whatever ties there are."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

TAKEN = tl.constexpr(-(1 << 63))
"""Lower than every score in its place."""


@triton.jit
def in_order(scores: tl.tensor, places: tl.tensor) -> tl.tensor:
    """Turn float32 scores into integers of the same order, all different: of equal scores the first place has the
    highest."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0 and 0 are equal
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - places).to(tl.int64)


@triton.jit
def place_of(order: tl.tensor) -> tl.tensor:
    """Return the places that such integers were made of."""
    return 0x7FFFFFFF - (order & 0x7FFFFFFF)


@triton.jit
def score_of(order: tl.tensor) -> tl.tensor:
    """Return the scores that such integers were made of."""
    bits = (order >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
