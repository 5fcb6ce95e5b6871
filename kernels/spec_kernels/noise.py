"""The lab's counter-based noise in kernels; keys and uniform draws have the bits of `spec_kernels.noise_reference`.

A draw is a hash and has no generator state, so a kernel and its torch rule draw the same numbers. Arrival times are
logarithms, which may differ in the last bit.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from spec_kernels.noise_reference import GAMMA, MULTIPLIER_1, MULTIPLIER_2, Use

USE_DRAFT = tl.constexpr(int(Use.DRAFT))
USE_ACCEPT = tl.constexpr(int(Use.ACCEPT))
USE_EMIT = tl.constexpr(int(Use.EMIT))
USE_SYNTHETIC = tl.constexpr(int(Use.SYNTHETIC))

_GAMMA = tl.constexpr(GAMMA)
_MULTIPLIER_1 = tl.constexpr(MULTIPLIER_1)
_MULTIPLIER_2 = tl.constexpr(MULTIPLIER_2)


@triton.jit
def _mix(bits: tl.tensor) -> tl.tensor:
    """Mix the bits. The masks make the shifts logical, since `>>` repeats the sign bit."""
    bits = (bits ^ ((bits >> 30) & ((1 << 34) - 1))) * _MULTIPLIER_1
    bits = (bits ^ ((bits >> 27) & ((1 << 37) - 1))) * _MULTIPLIER_2
    return bits ^ ((bits >> 31) & ((1 << 33) - 1))


@triton.jit
def _child(keys: tl.tensor, index: tl.tensor) -> tl.tensor:
    return _mix(keys + (index + 1) * _GAMMA)


@triton.jit
def round_key(seed: tl.tensor, kv_len: tl.tensor, rows: tl.tensor, USE: tl.constexpr) -> tl.tensor:
    """Return the int64 keys of draws. All arguments are int64, and `rows` may be a tile."""
    keys = _child(_child(_mix(seed), kv_len), rows)
    # `_child` multiplies USE. A product of two constants is made in Python and does not wrap around; a tensor's does.
    return _child(keys, tl.zeros_like(keys) + USE)


@triton.jit
def uniform(keys: tl.tensor) -> tl.tensor:
    """Return float64 in the open interval (0, 1): the upper 52 bits."""
    return (((keys >> 12) & ((1 << 52) - 1)).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def arrival(key: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """Return float64 arrival times of an exponential race of rate 1. A race compares weight / arrival."""
    return -tl.log(uniform(_child(key, ids.to(tl.int64))))
