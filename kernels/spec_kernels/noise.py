"""The lab's counter-based noise on the device: `spec_lab.acceptance.noise`, bit for bit, in kernels and in torch.

A draw is a hash of (request seed, committed length at the start of the round, row, use), never a generator's state, so
a kernel and the rule it stands for draw the same numbers. The hash is splitmix64 (Steele, Lea and Flood, OOPSLA 2014)
in int64 that wraps around.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

USE_DRAFT = tl.constexpr(0)
USE_ACCEPT = tl.constexpr(1)
USE_EMIT = tl.constexpr(2)

_GAMMA = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
_MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
_MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB - 2**64)


@triton.jit
def _mix(bits: tl.tensor) -> tl.tensor:
    """The masks make the shifts logical: `>>` repeats the sign bit."""
    bits = (bits ^ ((bits >> 30) & ((1 << 34) - 1))) * _MULTIPLIER_1
    bits = (bits ^ ((bits >> 27) & ((1 << 37) - 1))) * _MULTIPLIER_2
    return bits ^ ((bits >> 31) & ((1 << 33) - 1))


@triton.jit
def _child(keys: tl.tensor, index: tl.tensor) -> tl.tensor:
    return _mix(keys + (index + 1) * _GAMMA)


@triton.jit
def round_key(seed: tl.tensor, kv_len: tl.tensor, rows: tl.tensor, USE: tl.constexpr) -> tl.tensor:
    """int64 key of a draw; all int64, `rows` may be a tile."""
    keys = _child(_child(_mix(seed), kv_len), rows)
    return _child(keys, tl.zeros_like(keys) + USE)  # as a constant, the product would not wrap around


@triton.jit
def uniform(keys: tl.tensor) -> tl.tensor:
    """float64 in the open interval (0, 1): the upper 52 bits."""
    return (((keys >> 12) & ((1 << 52) - 1)).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def arrival(key: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """float64 arrival times of an exponential race of rate 1; over them, weights are compared."""
    return -tl.log(uniform(_child(key, ids.to(tl.int64))))


def _mix_reference(bits: torch.Tensor) -> torch.Tensor:
    bits = (bits ^ ((bits >> 30) & ((1 << 34) - 1))) * _MULTIPLIER_1.value
    bits = (bits ^ ((bits >> 27) & ((1 << 37) - 1))) * _MULTIPLIER_2.value
    return bits ^ ((bits >> 31) & ((1 << 33) - 1))


def _child_reference(keys: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return _mix_reference(keys + (index + 1) * _GAMMA.value)


def round_key_reference(
    seeds: torch.Tensor, kv_lens: torch.Tensor, rows: torch.Tensor, use: tl.constexpr
) -> torch.Tensor:
    """int64 tensors that broadcast."""
    keys = _child_reference(_child_reference(_mix_reference(seeds), kv_lens), rows)
    return _child_reference(keys, torch.full_like(keys, use.value))


def uniform_reference(keys: torch.Tensor) -> torch.Tensor:
    return (((keys >> 12) & ((1 << 52) - 1)).double() + 0.5) * 2.0**-52


def race_reference(weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[batch] indices drawn in proportion to `weights` [batch, vocab], with `keys` [batch]."""
    ids = torch.arange(weights.shape[-1], device=weights.device)
    return (weights / -torch.log(uniform_reference(_child_reference(keys.unsqueeze(-1), ids)))).argmax(dim=-1)
