"""Matrix products with weights fixed for the whole run.

On a CPU in float32 the weight is packed for oneDNN once. Two reasons, both measured on 2 cores with the pocket shapes:
a product of four rows costs a third to an eighth of `F.linear`'s (which goes to MKL), and a row's result is bit-equal
whatever the number of rows beside it. The attention's products are not, so that the logits of verifying N rows and of
decoding one still differ by some 1e-6.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import copy
from typing import Protocol, cast

import torch
import torch.nn.functional as F

from spec_kernels.block_fp8_reference import BLOCK_SIZE, dequantise_reference, packed


class Linear(Protocol):
    """Multiplies [rows, in_features] to [rows, out_features]."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...


Dequantise = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes what a packed weight and its scales stand for: `dequantise_reference`, or a kernel."""


class WholeLinear(Protocol):
    """A product of one process that can say what it multiplies by."""

    bias: torch.Tensor | None

    def dense_weight(self) -> torch.Tensor:
        """Return the weight [out_features, in_features], whichever way it lies here."""
        ...


def whole_linear(linear: Linear) -> WholeLinear:
    """Return a product of one process, which is whole wherever this is asked for."""
    return cast(WholeLinear, linear)


class StreamedLinear(Protocol):
    """Has a weight that lies as kernels read it.

    Attributes:
        weight: [out_features, in_features]; in e4m3 as `Fp8Linear` has it.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of outputs and of inputs."""
        ...

    @property
    def scales(self) -> torch.Tensor | None:
        """Return what the blocks of a weight in e4m3 are multiplied by; None for others."""
        ...

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...

    def add_to(self, stream: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Add the product to [rows, out_features], in place; a product without a bias. Returns `stream`."""
        ...

    def widened_by(self, dequantise: Dequantise) -> StreamedLinear:
        """Return the library's product, for which `dequantise` widens a weight in e4m3."""
        ...


class DenseLinear:
    """Uses the library's own product."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.weight, self.bias)

    def add_to(self, stream: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        assert self.bias is None
        return stream.addmm_(rows, self.weight.t())

    def dense_weight(self) -> torch.Tensor:
        return self.weight

    @property
    def shape(self) -> tuple[int, int]:
        out_features, in_features = self.weight.shape
        return out_features, in_features

    @property
    def scales(self) -> None:
        return None

    def widened_by(self, dequantise: Dequantise) -> DenseLinear:
        return self


class Fp8Linear:
    """Uses the library's product on an e4m3 weight that is widened for it, every time anew.

    Attributes:
        weight: [out_features, 64 * blocks of inputs] int16, as the kernels read it.
        scales: [blocks of rows, blocks of inputs], or a row for each of the weight's where blocks are not the same.
    """

    __slots__ = ("_dequantise", "bias", "scales", "shape", "weight")

    def __init__(self, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Take a float8_e4m3fn weight [out_features, in_features], and scales for each of its rows."""
        self.shape: tuple[int, int] = (values.shape[0], values.shape[1])
        self.weight, self.scales = packed(values), by_blocks(scales)
        self.bias = bias
        self._dequantise: Dequantise = dequantise_reference

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self._widened(rows), self.bias)

    def add_to(self, stream: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        assert self.bias is None
        return stream.addmm_(rows, self._widened(rows).t())

    def _widened(self, rows: torch.Tensor) -> torch.Tensor:
        wide = rows.new_empty(self.shape)
        self._dequantise(wide, self.weight, self.scales)
        return wide

    def widened_by(self, dequantise: Dequantise) -> Fp8Linear:
        other = copy(self)
        other._dequantise = dequantise
        return other


def by_blocks(scales: torch.Tensor) -> torch.Tensor:
    """Return a row of scales for each block of 128, where all rows of a block have the same ones; else those of rows.

    Blocks of several projections that are one product need not begin where its own do.
    """
    of_blocks = scales[::BLOCK_SIZE].contiguous()
    same = torch.equal(of_blocks.repeat_interleave(BLOCK_SIZE, dim=0)[: len(scales)], scales)
    return of_blocks if same else scales


class PackedLinear:
    """A product whose weight lies in oneDNN's blocked layout: the operator that torch.compile's CPU freezing uses."""

    __slots__ = ("_product", "bias", "packed")

    # One packing for all row counts: packing for a given count would choose another layout, and other rounding.
    _ROWS_HINT = 4

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self._ROWS_HINT)
        self.bias = bias
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._product(rows, self.packed, self.bias, "none", [], "")

    def dense_weight(self) -> torch.Tensor:
        return self.packed.to_dense()


def can_pack(weight: torch.Tensor) -> bool:
    """Return whether `weight` is one that oneDNN packs here, and warn where a float32 weight on a CPU cannot be
    packed. One that is trained changes with every step, and is not."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.requires_grad:
        return False
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return True
    warnings.warn("this torch cannot pack weights for oneDNN; float32 products on the CPU are slower", stacklevel=2)
    return False


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None, scales: torch.Tensor | None = None) -> Linear:
    """Make the fastest product for this weight [out_features, in_features]; one in e4m3 has `scales`, for each row
    [out_features, blocks of inputs]."""
    if scales is not None:
        return Fp8Linear(weight, scales, bias)
    return PackedLinear(weight, bias) if can_pack(weight) else DenseLinear(weight, bias)


def fused_linear(
    weights: list[torch.Tensor], biases: list[torch.Tensor] | None = None, scales: list[torch.Tensor] | None = None
) -> Linear:
    """Make one product for several projections of the same rows; weights, and the scales of those in e4m3, are stacked
    along the output."""
    bias, of_rows = (torch.cat(parts) if parts else None for parts in (biases, scales))
    return make_linear(torch.cat(weights), bias, of_rows)


Activation = Callable[[torch.Tensor], torch.Tensor]


def gelu_tanh(rows: torch.Tensor) -> torch.Tensor:
    """Compute Gemma's activation: GELU by its approximation with tanh."""
    return F.gelu(rows, approximate="tanh")


class GatedMLP:
    """Computes down(activation(gate(x)) * up(x)), with gate and up fused."""

    __slots__ = ("activation", "down", "gate_up")

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation = F.silu) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = activation

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(rows).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)
