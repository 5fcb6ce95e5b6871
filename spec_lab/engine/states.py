"""Tracks which recurrent state each slot continues from, for targets with recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from spec_lab.core.kv_cache import PagedKVCache
from spec_lab.core.recurrent_cache import RecurrentCache, RecurrentRows


class SlotStates(Protocol):
    """The recurrent states of the slots, as the round and the prompt pass use them."""

    def of_round(self, slot_ids: torch.Tensor) -> RecurrentRows | None:
        """Describe the verify rows of `slot_ids` [batch], and the state that they begin with."""
        ...

    def of_prompts(self, slot_ids: torch.Tensor) -> RecurrentRows | None:
        """Describe prompt chunks in `slot_ids` [batch]. Only the last row of each chunk leaves a state."""
        ...

    def commit(self, slot_ids: torch.Tensor, last_rows: torch.Tensor) -> None:
        """Continue each slot from the state after verify row `last_rows` [batch]: n - 1, or 0 for a padded row."""
        ...

    def clear(self, slot: int) -> None:
        """Reset the slot's state for a new request."""
        ...


class NoStates:
    """The tracker for targets whose layers all keep keys and values. They have no states."""

    def of_round(self, slot_ids: torch.Tensor) -> None:
        return None

    def of_prompts(self, slot_ids: torch.Tensor) -> None:
        return None

    def commit(self, slot_ids: torch.Tensor, last_rows: torch.Tensor) -> None:
        """Do nothing: the keys and values of rejected rows are overwritten."""

    def clear(self, slot: int) -> None:
        """Do nothing: rows past a slot's length are never read."""


class RecurrentStates:
    """Tracks which state of each slot is committed, by an index on the device. Captured rounds can read and set it.

    Attributes:
        committed: [num_slots + 1] the last accepted row of the previous round, n - 1; 0 before the first.
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
    """Make the tracker of the states in a target's cache."""
    return RecurrentStates(cache.recurrent) if cache.recurrent else NoStates()
