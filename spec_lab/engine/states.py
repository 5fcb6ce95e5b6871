"""This module keeps track of the state that each slot goes on from, where layers carry one from row to row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from spec_lab.core.kv_cache import PagedKVCache
from spec_lab.core.recurrent_cache import RecurrentCache, RecurrentRows


class SlotStates(Protocol):
    """The states of the slots, as the round and the prompt pass see them."""

    def of_round(self, slot_ids: torch.Tensor) -> RecurrentRows | None:
        """Say where the verify rows of [batch] slots begin, and that each of them leaves a state."""
        ...

    def of_prompts(self, slot_ids: torch.Tensor) -> RecurrentRows | None:
        """Say the same of stretches of prompts in [batch] slots, of which the last row of each leaves a state."""
        ...

    def commit(self, slot_ids: torch.Tensor, last_rows: torch.Tensor) -> None:
        """Go on behind verify row `last_rows` [batch] of each slot, n - 1; 0 for a padded one."""
        ...

    def clear(self, slot: int) -> None:
        """Forget what an earlier request left."""
        ...


class NoStates:
    """Slots of targets whose layers all keep keys and values, and so have no states."""

    def of_round(self, slot_ids: torch.Tensor) -> None:
        return None

    def of_prompts(self, slot_ids: torch.Tensor) -> None:
        return None

    def commit(self, slot_ids: torch.Tensor, last_rows: torch.Tensor) -> None:
        """Do nothing: keys and values of rejected rows are written over."""

    def clear(self, slot: int) -> None:
        """Do nothing: rows past a slot's length are never read."""


class RecurrentStates:
    """Which state of each slot is committed: an index on the device, where the captured round sets and reads it.

    Attributes:
        committed: [num_slots + 1] the last row of the round before that was accepted, n - 1.
    """

    def __init__(self, layers: Sequence[RecurrentCache]) -> None:
        inputs = layers[0].windows.inputs
        self._layers = layers
        self.committed = torch.zeros(inputs.shape[0], dtype=torch.int64, device=inputs.device)

    def of_round(self, slot_ids: torch.Tensor) -> RecurrentRows:
        return RecurrentRows(slot_ids, self.committed.index_select(0, slot_ids), is_prompt=False)

    def of_prompts(self, slot_ids: torch.Tensor) -> RecurrentRows:
        return RecurrentRows(slot_ids, self.committed.index_select(0, slot_ids), is_prompt=True)

    def commit(self, slot_ids: torch.Tensor, last_rows: torch.Tensor) -> None:
        self.committed.index_copy_(0, slot_ids, last_rows)

    def clear(self, slot: int) -> None:
        self.committed[slot] = 0
        for layer in self._layers:
            layer.clear(slot)


def slot_states(cache: PagedKVCache) -> SlotStates:
    """Make what keeps track of the states in a target's cache."""
    return RecurrentStates(cache.recurrent) if cache.recurrent else NoStates()
