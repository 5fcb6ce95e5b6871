"""The cache of layers that carry a state from row to row, as every part sees it: by request slot, never by page.

Keys and values of rejected drafts are simply written over, but a state cannot be taken back. How it is kept so that any
number of a round's rows may turn out to stay is a layer's own matter (`models/delta_caches.py`); after acceptance an
index alone is set, on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(slots=True)
class RecurrentRows:
    """The slots of one forward, for the layers that have a state.

    Attributes:
        slot_ids: [batch] slot of each request; padded ones have the scratch slot.
        committed: [batch] the row of each slot's last round behind which the forward begins, n - 1.
        is_prompt: all rows stay, so that the state behind the last of them is the only one that is kept.
    """

    slot_ids: torch.Tensor
    committed: torch.Tensor
    is_prompt: bool


@dataclass(frozen=True, slots=True)
class ConvWindows:
    """The inputs of a layer's causal convolution. The last slot is the scratch slot of padded rows.

    With r the committed row of a slot, `inputs[slot, r : r + history]` are those that precede its next row.

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
        """Return what precedes the next row of each slot, a copy: [batch, history, conv_size]."""
        first = rows.slot_ids * self.inputs.shape[1] + rows.committed
        columns = first.unsqueeze(1) + torch.arange(history, device=first.device)
        found = self.inputs.flatten(0, 1).index_select(0, columns.view(-1))
        return found.view(*columns.shape, -1)

    def write(self, rows: RecurrentRows, inputs: torch.Tensor) -> None:
        """Keep [batch, columns, conv_size] as the first columns."""
        self.inputs[:, : inputs.shape[1]].index_copy_(0, rows.slot_ids, inputs)


class RecurrentCache(Protocol):
    """What one layer remembers of the texts in the slots."""

    windows: ConvWindows

    def clear(self, slot: int) -> None:
        """Begin anew: the state before a text's first row is zero, and zeros precede it."""
        ...
