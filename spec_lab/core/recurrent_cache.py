"""The state of layers that carry one from row to row, as every part sees it: by request slot, never by page.

Keys and values of rejected drafts are simply written over, but a state cannot be taken back. As in vLLM's
`MambaSpec.num_speculative_blocks`, verify leaves a state behind each of its rows, and after acceptance an index says
which of them the next round begins with: nothing is copied, and the host is not asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class RecurrentRows:
    """The slots of one forward, for the layers that have a state.

    Attributes:
        slot_ids: [batch] slot of each request; padded ones have the scratch slot.
        committed: [batch] row of each slot's states that the forward begins with.
        is_prompt: all rows stay, so that the state behind the last of them is the only one that is kept.
    """

    slot_ids: torch.Tensor
    committed: torch.Tensor
    is_prompt: bool


@dataclass(frozen=True, slots=True)
class RecurrentCache:
    """The states of one layer. The last slot is the scratch slot of padded rows.

    With r the committed row of a slot, `states[slot, r]` is the state behind its last token, and
    `windows[slot, r : r + history]` are the rows of the convolution's input that precede the next one.

    Attributes:
        states: [num_slots + 1, N, num_value_heads, key_head_dim, value_head_dim] float32, one behind each verify row.
        windows: [num_slots + 1, history + N - 1, conv_size] inputs of the convolution, in the model's dtype.
    """

    states: torch.Tensor
    windows: torch.Tensor

    @classmethod
    def zeros(
        cls,
        num_slots: int,
        num_rows: int,
        state_shape: tuple[int, ...],
        window_shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> RecurrentCache:
        """Make the cache of `num_slots` requests, of which verify runs `num_rows` rows. `window_shape` is [history,
        conv_size], of one slot without drafts."""
        history, conv_size = window_shape
        return cls(
            torch.zeros((num_slots + 1, num_rows, *state_shape), dtype=torch.float32, device=device),
            torch.zeros((num_slots + 1, history + num_rows - 1, conv_size), dtype=dtype, device=device),
        )

    def read_states(self, rows: RecurrentRows) -> torch.Tensor:
        """Return the committed states [batch, num_value_heads, key_head_dim, value_head_dim], which are a copy."""
        num_rows = self.states.shape[1]
        return self.states.flatten(0, 1).index_select(0, rows.slot_ids * num_rows + rows.committed)

    def write_states(self, rows: RecurrentRows, row: int, states: torch.Tensor) -> None:
        """Keep the states behind verify row `row`."""
        self.states[:, row].index_copy_(0, rows.slot_ids, states)

    def read_windows(self, rows: RecurrentRows, history: int) -> torch.Tensor:
        """Return the inputs of the convolution that precede the next row, a copy: [batch, history, conv_size]."""
        first = rows.slot_ids * self.windows.shape[1] + rows.committed
        columns = first.unsqueeze(1) + torch.arange(history, device=first.device)
        found = self.windows.flatten(0, 1).index_select(0, columns.view(-1))
        return found.view(*columns.shape, -1)

    def write_windows(self, rows: RecurrentRows, windows: torch.Tensor) -> None:
        """Keep [batch, columns, conv_size] as the first columns of the windows."""
        self.windows[:, : windows.shape[1]].index_copy_(0, rows.slot_ids, windows)

    def clear(self, slot: int) -> None:
        """Begin anew: the state before a text's first row is zero, and zeros precede it."""
        self.states[slot, 0].zero_()
        self.windows[slot].zero_()
