"""The cache of recurrent layers, whose state changes from row to row. It is indexed by request slot and has no pages.

Keys and values of rejected drafts are simply overwritten, but a state cannot be undone. Each kind of layer decides how
to keep states so that a round can be rolled back to any row (`models/delta_caches.py`). After acceptance only an index
on the device is set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(slots=True)
class RecurrentRows:
    """The slots of one forward, for layers that have a state.

    Attributes:
        slot_ids: [batch] slot of each request; padded ones have the scratch slot.
        committed: [batch] the last accepted row of each slot's previous round, n - 1. The forward starts from the state
            after it.
        is_prompt: all rows are committed, so only the state after the last row is kept.
    """

    slot_ids: torch.Tensor
    committed: torch.Tensor
    is_prompt: bool


@dataclass(frozen=True, slots=True)
class ConvWindows:
    """The latest inputs of a layer's causal convolution. The last slot is the scratch slot, for padded rows.

    If r is the committed row of a slot, `inputs[slot, r : r + history]` are the inputs that precede its next row.

    Attributes:
        inputs: [num_slots + 1, history + N - 1, conv_size] in the model's dtype.
    """

    inputs: torch.Tensor

    @classmethod
    def zeros(
        cls, num_slots: int, num_columns: int, conv_size: int, dtype: torch.dtype, device: torch.device
    ) -> ConvWindows:
        return cls(torch.zeros((num_slots + 1, num_columns, conv_size), dtype=dtype, device=device))

    def read(self, rows: RecurrentRows, history: int) -> torch.Tensor:
        """Return a copy of the inputs that precede the next row of each slot, [batch, history, conv_size]."""
        first = rows.slot_ids * self.inputs.shape[1] + rows.committed
        columns = first.unsqueeze(1) + torch.arange(history, device=first.device)
        found = self.inputs.flatten(0, 1).index_select(0, columns.view(-1))
        return found.view(*columns.shape, -1)

    def write(self, rows: RecurrentRows, inputs: torch.Tensor) -> None:
        """Write `inputs` [batch, columns, conv_size] to the first columns."""
        self.inputs[:, : inputs.shape[1]].index_copy_(0, rows.slot_ids, inputs)


class RecurrentCache(Protocol):
    """The states of one layer for the requests in all slots."""

    windows: ConvWindows

    def clear(self, slot: int) -> None:
        """Zero the slot's state and convolution inputs, as before the first row of a text."""
        ...
