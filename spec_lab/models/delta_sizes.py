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
    def history(self) -> int:
        """Rows before its own that the convolution sees."""
        return self.kernel_size - 1

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The state after one row: a matrix from keys to values for each value head."""
        return self.num_value_heads, self.key_head_dim, self.value_head_dim

    def slot_bytes(self, num_rows: int, item_size: int) -> int:
        """Bytes that one request's slot takes in a layer, for verify of `num_rows` rows."""
        windows = (self.history + num_rows - 1) * self.conv_size
        return num_rows * prod(self.state_shape) * STATE_ITEM_SIZE + windows * item_size
