"""The sizes of a gated delta net, of which a layer's plan knows. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

STATE_ITEM_SIZE = 4
"""Bytes of a number of the state, which is float32 whatever the model's dtype: in bfloat16 its errors add up."""


@dataclass(frozen=True, slots=True)
class DeltaNetSizes:
    """The sizes of one gated delta net (Yang et al. 2024, arXiv 2412.06464), as Qwen3-Next and Qwen3.5 have it.

    Attributes:
        num_key_heads: heads of the queries and of the keys; each serves several value heads that follow each other.
        kernel_size: rows that the causal convolution sees, its own included.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel_size: int

    @property
    def key_size(self) -> int:
        """Channels of the queries, and of the keys."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Channels of the values, of the gate and of the output."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_size(self) -> int:
        """Channels that go through the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def projected_sizes(self) -> tuple[int, int, int, int]:
        """Channels that one product makes of a row: for the convolution, the gate, strengths and time steps."""
        return self.conv_size, self.value_size, self.num_value_heads, self.num_value_heads

    @property
    def history(self) -> int:
        """Rows before its own that the convolution sees."""
        return self.kernel_size - 1

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The state after one row: a matrix from keys to values for each value head."""
        return self.num_value_heads, self.key_head_dim, self.value_head_dim

    def checkpoint_bytes(self, num_rows: int, item_size: int) -> int:
        """Count the bytes that one request's slot takes in a layer, with a state for each of `num_rows` verify rows."""
        return num_rows * prod(self.state_shape) * STATE_ITEM_SIZE + self._window_bytes(num_rows, item_size)

    def replay_bytes(self, num_rows: int, item_size: int) -> int:
        """Count the bytes that it takes with one state, and what `num_rows` verify rows did to it."""
        of_row = self.key_size + self.num_value_heads * (self.value_head_dim + 2)
        numbers = prod(self.state_shape) + num_rows * of_row
        return numbers * STATE_ITEM_SIZE + self._window_bytes(num_rows, item_size)

    def _window_bytes(self, num_rows: int, item_size: int) -> int:
        return (self.history + num_rows - 1) * self.conv_size * item_size
