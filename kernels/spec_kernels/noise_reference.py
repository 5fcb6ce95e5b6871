"""Counter-based noise: every draw is a hash of its purpose, so there is no generator state to share.

A draw's key is (request seed, L, row, use), where L is the request's length at the start of the round. It does not
depend on the slot, the batch or other requests, so a request's output depends only on its own seed and logits. L grows
every round, so no key of a request occurs twice.

The simpler key (seed, position) would occur twice. A round that stops after m drafts has also judged positions after m.
The next round would judge them again with the same noise, on which the stop depended. Rules that look past the stop,
such as block verification, would then sample a wrong distribution.

The hash is splitmix64 (Steele, Lea and Flood, OOPSLA 2014) in wrapping int64 operations. It has the same bits on a CPU
and on a GPU. It needs no value from the host, so a CUDA graph can capture it.

This is the torch form, for the lab's rules and the kernels' references. It does not import triton, since the lab also
runs without it. `spec_kernels.noise` is the same in kernels.
"""

from __future__ import annotations

from enum import IntEnum

import torch


class Use(IntEnum):
    """The purpose of a draw. Drafts, tests and emitted tokens must not share noise, since the rules assume that they
    are independent."""

    DRAFT = 0
    ACCEPT = 1
    EMIT = 2
    PROMPT = 3
    SYNTHETIC = 4


def _signed(value: int) -> int:
    """Return the int64 with the lowest 64 bits of `value`."""
    return (value + 2**63) % 2**64 - 2**63


GAMMA = _signed(0x9E3779B97F4A7C15)
MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
MULTIPLIER_2 = _signed(0x94D049BB133111EB)
_UNIFORM_BITS = 52


def _shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Shift logically: torch's `>>` repeats the sign bit."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def mix(bits: torch.Tensor) -> torch.Tensor:
    """Apply the output function of splitmix64: a bijection of int64 that scatters consecutive values."""
    bits = (bits ^ _shift_right(bits, 30)) * MULTIPLIER_1
    bits = (bits ^ _shift_right(bits, 27)) * MULTIPLIER_2
    return bits ^ _shift_right(bits, 31)


def child(keys: torch.Tensor, index: torch.Tensor | int) -> torch.Tensor:
    """Return value number `index` (from 0) of the splitmix64 stream that starts at `keys`; broadcasts."""
    step = (index + 1) * GAMMA
    return mix(keys + (_signed(step) if isinstance(step, int) else step))


def round_key(seeds: torch.Tensor, kv_lens: torch.Tensor, rows: torch.Tensor | int, use: Use) -> torch.Tensor:
    """Return the int64 key of a draw; `kv_lens` is L at the start of the round, `rows` the row in it. Broadcasts."""
    return child(child(child(mix(seeds), kv_lens), rows), int(use))


def uniform(keys: torch.Tensor) -> torch.Tensor:
    """Return the upper bits of each key as float64 in the open interval (0, 1): exact multiples of 2^-53."""
    return (_shift_right(keys, 64 - _UNIFORM_BITS).double() + 0.5) * 2.0**-_UNIFORM_BITS


def race(weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Sample an index in proportion to its weight, by an exponential race: the earliest arrival wins.

    This has the same distribution as the Gumbel trick, without a logarithm of the weights. It needs no sum, whose
    rounding would depend on the device and the batch.

    Args:
        weights: [batch, vocab], not negative, not all zero; they need not sum to one.
        keys: [batch].

    Returns:
        [batch] int64.
    """
    return race_speeds(weights, keys).argmax(dim=-1)


def race_speeds(weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the values [..., vocab] whose maximum decides `race`. In descending order they are draws without
    replacement."""
    index = torch.arange(weights.shape[-1], device=weights.device)
    arrivals = -torch.log(uniform(child(keys.unsqueeze(-1), index)))
    return weights / arrivals
