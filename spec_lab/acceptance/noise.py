"""Counter-based noise: every draw is a hash of what it is for, so there is no generator whose state could be shared.

A draw's key is (request seed, L at the start of the round, row, use). Nothing in it depends on the slot, the row of the
batch or the neighbours, so a request's output follows from its own logits. L grows every round, so no key comes twice.
The tempting key (seed, position) does: a round cut at m judged positions behind m too, and the next round would meet
them again with noise that is known to have failed. Rules that look behind the cut, such as block verification, then
sample the wrong distribution.

The hash is splitmix64 (Steele, Lea and Flood, OOPSLA 2014) in int64 operations that wrap around: the same bits on a CPU
and on a GPU, no host value needed, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from hashlib import blake2b

import torch

from spec_lab.core.types import Request


class Use(IntEnum):
    """What a draw is for. Drafts, tests and emitted tokens must not share noise: the rules take them as independent."""

    DRAFT = 0
    ACCEPT = 1
    EMIT = 2
    PROMPT = 3
    SYNTHETIC = 4


NoiseKey = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | int", Use], torch.Tensor]


def _signed(value: int) -> int:
    """The int64 with the lowest 64 bits of `value`."""
    return (value + 2**63) % 2**64 - 2**63


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)
_UNIFORM_BITS = 52


def _shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift: torch's `>>` repeats the sign bit."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def mix(bits: torch.Tensor) -> torch.Tensor:
    """The output function of splitmix64: a bijection of int64 that scatters neighbours."""
    bits = (bits ^ _shift_right(bits, 30)) * _MULTIPLIER_1
    bits = (bits ^ _shift_right(bits, 27)) * _MULTIPLIER_2
    return bits ^ _shift_right(bits, 31)


def child(keys: torch.Tensor, index: torch.Tensor | int) -> torch.Tensor:
    """Value number `index` (from 0) of the splitmix64 stream that starts at `keys`; broadcasts."""
    step = (index + 1) * _GAMMA
    return mix(keys + (_signed(step) if isinstance(step, int) else step))


def round_key(seeds: torch.Tensor, kv_lens: torch.Tensor, rows: torch.Tensor | int, use: Use) -> torch.Tensor:
    """int64 key of a draw; `kv_lens` is L at the start of the round, `rows` the row in it. Broadcasts."""
    return child(child(child(mix(seeds), kv_lens), rows), int(use))


def uniform(keys: torch.Tensor) -> torch.Tensor:
    """The upper bits of each key as float64 in the open interval (0, 1): exact multiples of 2^-53."""
    return (_shift_right(keys, 64 - _UNIFORM_BITS).double() + 0.5) * 2.0**-_UNIFORM_BITS


def race(weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Sample an index in proportion to its weight, by an exponential race: the earliest arrival wins.

    The same law as the Gumbel trick, without a logarithm of the weights; no sum and no cumulative sum, whose rounding
    would depend on the device and on the batch.

    Args:
        weights: [batch, vocab], not negative, not all zero; they need not sum to one.
        keys: [batch].

    Returns:
        [batch] int64.
    """
    index = torch.arange(weights.shape[-1], device=weights.device)
    arrivals = -torch.log(uniform(child(keys.unsqueeze(-1), index)))
    return (weights / arrivals).argmax(dim=-1)


def request_seed(run_seed: int, request_id: str) -> int:
    """The seed of one request: follows its id, so that neither the order of admission nor the slot matters."""
    digest = blake2b(request_id.encode(), digest_size=8, key=f"spec_lab:{run_seed}".encode()).digest()
    return int.from_bytes(digest, "little", signed=True)


class SlotSeeds:
    """values: [num_slots + 1] request seed of each slot; the last one is the scratch slot's."""

    def __init__(self, num_slots: int, run_seed: int, device: torch.device) -> None:
        self._run_seed = run_seed
        self.values = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)

    def admit(self, slot: int, request: Request) -> None:
        self.values[slot] = request_seed(self._run_seed, request.request_id)

    def of(self, slot_ids: torch.Tensor) -> torch.Tensor:
        return self.values.index_select(0, slot_ids)

    def of_slot(self, slot: int) -> torch.Tensor:
        """[1]"""
        return self.values[slot : slot + 1]
