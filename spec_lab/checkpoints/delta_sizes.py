"""The sizes of a gated delta net, which are part of a layer's plan. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


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
