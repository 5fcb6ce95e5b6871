"""The sizes of a gated delta net, which are part of a layer's plan. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

STATE_ITEM_SIZE = 4
"""Bytes of a state element. The state is always float32, since in bfloat16 its errors would accumulate."""


@dataclass(frozen=True, slots=True)
class DeltaNetSizes:
    """The sizes of one gated delta net (Yang et al. 2024, arXiv 2412.06464), as Qwen3-Next and Qwen3.5 have it.

    Attributes:
        num_key_heads: heads of the queries and of the keys; each serves one or more adjacent value heads.
        kernel_size: number of rows that the causal convolution reads, including the current one.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel_size: int

    @property
    def key_size(self) -> int:
        """Return the number of channels of the queries, which is also that of the keys."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Return the number of channels of the values, which is also that of the gate and of the output."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_size(self) -> int:
        """Return the number of channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def projected_sizes(self) -> tuple[int, int, int, int]:
        """Return the output sizes of the first product: convolution input, gate, strengths and time steps."""
        return self.conv_size, self.value_size, self.num_value_heads, self.num_value_heads

    @property
    def history(self) -> int:
        """Return the number of earlier rows that the convolution reads."""
        return self.kernel_size - 1

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Return the shape of the state after one row: a matrix from keys to values for each value head."""
        return self.num_value_heads, self.key_head_dim, self.value_head_dim

    def checkpoint_bytes(self, num_rows: int, item_size: int) -> int:
        """Return the bytes of one request's slot in a layer if a state is stored for each of `num_rows` verify rows."""
        return num_rows * prod(self.state_shape) * STATE_ITEM_SIZE + self._window_bytes(num_rows, item_size)

    def replay_bytes(self, num_rows: int, item_size: int) -> int:
        """Return the bytes of the slot if it has one state and the updates by `num_rows` verify rows."""
        of_row = self.key_size + self.num_value_heads * (self.value_head_dim + 2)
        numbers = prod(self.state_shape) + num_rows * of_row
        return numbers * STATE_ITEM_SIZE + self._window_bytes(num_rows, item_size)

    def _window_bytes(self, num_rows: int, item_size: int) -> int:
        return (self.history + num_rows - 1) * self.conv_size * item_size
