"""Two caches for the states of gated delta nets, which can roll back to any row of a round (`recurrent.rollback`).

The last slot of each tensor is the scratch slot, for padded rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from spec_lab.checkpoints.plan import DeltaNetSizes
from spec_lab.core.recurrent_cache import ConvWindows, RecurrentCache, RecurrentRows
from spec_lab.models.delta_rule import DeltaRows, delta_in_chunks, delta_row_by_row

Rows = TypeVar("Rows", contravariant=True)


class DeltaCache(RecurrentCache, Protocol[Rows]):
    """The states of one layer. It takes rows in the form that the `DeltaSteps` of the same kernels make."""

    def prompt(self, rows: Rows, slots: RecurrentRows) -> torch.Tensor:
        """Run rows that are all committed; return their outputs [batch, num_rows, num_value_heads, value_head_dim]."""
        ...

    def verify(self, rows: Rows, slots: RecurrentRows) -> torch.Tensor:
        """Run rows that may be rejected, and return their outputs. In the next round `slots.committed` names the last
        accepted row."""
        ...


class StateEachRowSlots:
    """Stores the state after each verify row. The next round begins with the state after the last accepted row (vLLM's
    `MambaSpec.num_speculative_blocks`).

    Attributes:
        states: [num_slots + 1, N, num_value_heads, key_head_dim, value_head_dim] float32, since errors would
            accumulate in bfloat16. After a prompt, the state is that of row 0.
    """

    def __init__(
        self, sizes: DeltaNetSizes, num_slots: int, num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`num_rows`: N, the most rows that a round verifies for a request."""
        shape = (num_slots + 1, num_rows, *sizes.state_shape)
        self.states = torch.zeros(shape, dtype=torch.float32, device=device)
        num_columns = sizes.history + num_rows - 1
        self.windows = ConvWindows.zeros(num_slots, num_columns, sizes.conv_size, dtype, device)

    def clear(self, slot: int) -> None:
        self.states[slot, 0].zero_()
        self.windows.inputs[slot].zero_()


class StateCheckpoints(StateEachRowSlots):
    """rollback=checkpoints: to roll back, the next forward begins with the state of an earlier row."""

    def prompt(self, rows: DeltaRows, slots: RecurrentRows) -> torch.Tensor:
        outputs, states = delta_in_chunks(rows, self._committed(slots))
        self._write(slots, 0, states)
        return outputs

    def verify(self, rows: DeltaRows, slots: RecurrentRows) -> torch.Tensor:
        outputs = []
        for row, (output, states) in enumerate(delta_row_by_row(rows, self._committed(slots))):
            self._write(slots, row, states)
            outputs.append(output)
        return torch.stack(outputs, dim=1)

    def _committed(self, slots: RecurrentRows) -> torch.Tensor:
        """Return a copy of the states that a forward begins with."""
        num_rows = self.states.shape[1]
        return self.states.flatten(0, 1).index_select(0, slots.slot_ids * num_rows + slots.committed)

    def _write(self, slots: RecurrentRows, row: int, states: torch.Tensor) -> None:
        self.states[:, row].index_copy_(0, slots.slot_ids, states)


class OneStateSlots:
    """Stores one state, from before the last round, and the updates of that round's rows.

    The next round first replays the updates of the accepted rows.

    Attributes:
        states: [num_slots + 1, num_value_heads, key_head_dim, value_head_dim] float32.
        keys: [num_slots + 1, N, num_key_heads, key_head_dim]; this and the next three as in `DeltaRows`.
    """

    def __init__(
        self, sizes: DeltaNetSizes, num_slots: int, num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`num_rows`: N, the most rows that a round verifies for a request."""

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros((num_slots + 1, *shape), dtype=torch.float32, device=device)

        self.states = zeros(*sizes.state_shape)
        self.keys = zeros(num_rows, sizes.num_key_heads, sizes.key_head_dim)
        self.values = zeros(num_rows, sizes.num_value_heads, sizes.value_head_dim)
        self.log_decay, self.strength = zeros(num_rows, sizes.num_value_heads), zeros(num_rows, sizes.num_value_heads)
        num_columns = sizes.history + num_rows - 1
        self.windows = ConvWindows.zeros(num_slots, num_columns, sizes.conv_size, dtype, device)

    def clear(self, slot: int) -> None:
        """Zero the slot, including its updates, so that the first round after the prompt replays nothing."""
        for part in (self.states, self.keys, self.values, self.log_decay, self.strength, self.windows.inputs):
            part[slot].zero_()


class ReplayedUpdates(OneStateSlots):
    """rollback=replay: a slot takes little more memory than one state, and a round replays up to N rows."""

    def prompt(self, rows: DeltaRows, slots: RecurrentRows) -> torch.Tensor:
        outputs, states = delta_in_chunks(rows, self.states.index_select(0, slots.slot_ids))
        self.states.index_copy_(0, slots.slot_ids, states)
        return outputs

    def verify(self, rows: DeltaRows, slots: RecurrentRows) -> torch.Tensor:
        _, states = delta_in_chunks(self._accepted(slots), self.states.index_select(0, slots.slot_ids))
        self.states.index_copy_(0, slots.slot_ids, states)
        for kept, part in (
            (self.keys, rows.keys),
            (self.values, rows.values),
            (self.log_decay, rows.log_decay),
            (self.strength, rows.strength),
        ):
            kept[:, : rows.num_rows].index_copy_(0, slots.slot_ids, part)
        outputs, _ = delta_in_chunks(rows, states)
        return outputs

    def _accepted(self, slots: RecurrentRows) -> DeltaRows:
        """Return the last round's rows up to the committed one, followed by zero rows, which change nothing."""
        stays = torch.arange(self.keys.shape[1], device=self.keys.device) <= slots.committed.unsqueeze(1)

        def read(part: torch.Tensor) -> torch.Tensor:
            rows = part.index_select(0, slots.slot_ids)
            return torch.where(stays.view(*stays.shape, *(1,) * (rows.dim() - 2)), rows, 0.0)

        keys = read(self.keys)
        return DeltaRows(keys, keys, read(self.values), read(self.log_decay), strength=read(self.strength))


CacheMaker = Callable[[DeltaNetSizes, int, int, torch.dtype, torch.device], DeltaCache[Any]]
"""Makes a layer's cache from sizes, number of slots, N, dtype and device."""
