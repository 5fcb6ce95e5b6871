"""Tracks which recurrent state each slot continues from, for targets with recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spec_lab.core.recurrent_cache import RecurrentCache, RecurrentRows


class SlotStates:
    """Tracks which state of each slot is committed, by an index on the device. Captured rounds can read and set it.

    Without layers that have a state there is nothing to track.

    Attributes:
        committed: [num_slots + 1] the last accepted row of the previous round, n - 1; 0 before the first.
    """

    def __init__(self, layers: Sequence[RecurrentCache]) -> None:
        self._layers = layers
        if layers:
            inputs = layers[0].windows.inputs
            self.committed = torch.zeros(inputs.shape[0], dtype=torch.int64, device=inputs.device)

    def of_round(self, slot_ids: torch.Tensor) -> RecurrentRows | None:
        """Describe the verify rows of `slot_ids` [batch], and the state that they begin with."""
        return self._rows(slot_ids, is_prompt=False)

    def of_prompts(self, slot_ids: torch.Tensor) -> RecurrentRows | None:
        """Describe prompt chunks in `slot_ids` [batch]. Only the last row of each chunk leaves a state."""
        return self._rows(slot_ids, is_prompt=True)

    def commit(self, slot_ids: torch.Tensor, last_rows: torch.Tensor) -> None:
        """Continue each slot from the state after verify row `last_rows` [batch]: n - 1, or 0 for a padded row."""
        if self._layers:
            self.committed.index_copy_(0, slot_ids, last_rows)

    def clear(self, slot: int) -> None:
        """Reset the slot's state for a new request."""
        if self._layers:
            self.committed[slot] = 0
        for layer in self._layers:
            layer.clear(slot)

    def _rows(self, slot_ids: torch.Tensor, is_prompt: bool) -> RecurrentRows | None:
        if not self._layers:
            return None
        return RecurrentRows(slot_ids, self.committed.index_select(0, slot_ids), is_prompt)
