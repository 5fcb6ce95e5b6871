"""Matrix products with the weights of a model.

On a CPU in float32 a weight that is not trained is packed for oneDNN. On 2 cores, with the pocket target's sizes, a
product of four rows then takes a third to an eighth of the time of `F.linear`, which uses MKL. Also, a row's result has
the same bits whatever the number of rows. This does not hold for attention. So the logits of N verify rows still differ
by some 1e-6 from those of decoding row by row.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import copy
from typing import Protocol, cast

import torch
import torch.nn.functional as F

from spec_kernels.block_fp8_reference import BLOCK_SIZE, packed
from spec_kernels.four_bits_reference import packed_codes, packed_scales, widen_reference


class Linear(Protocol):
    """A product from [rows, in_features] to [rows, out_features]."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...


Dequantise = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes a packed weight, times its scales, in a wider dtype: `widen_reference`, or a kernel."""


class WholeLinear(Protocol):
    """A product that is whole in one process and can return its weight."""

    bias: torch.Tensor | None

    def dense_weight(self) -> torch.Tensor:
        """Return the weight [out_features, in_features] as a dense tensor, however it is stored."""
        ...


def whole_linear(linear: Linear) -> WholeLinear:
    """Cast to `WholeLinear`. Callers only pass products that are whole in one process."""
    return cast(WholeLinear, linear)


class StreamedLinear(Protocol):
    """A product whose weight is stored as kernels read it.

    Attributes:
        weight: [out_features, in_features]; a narrow weight is stored as in `NarrowLinear`.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of outputs and the number of inputs."""
        ...

    @property
    def scales(self) -> torch.Tensor | None:
        """Return the scales of a narrow weight; None for other weights."""
        ...

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...

    def add_to(self, stream: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Add the product to `stream` [rows, out_features] in place, and return `stream`. There must be no bias."""
        ...

    def widened_by(self, dequantise: Dequantise) -> StreamedLinear:
        """Return the same product, computed by torch; it widens a narrow weight with `dequantise`."""
        ...


class DenseLinear:
    """Uses torch's product."""

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


class NarrowLinear:
    """Uses torch's product on a weight of 8 or 4 bits, which is widened in every call.

    Attributes:
        weight: [out_features, 64 * blocks of inputs] int16, as the kernels read it; for 4 bits, 32 * blocks.
        scales: for e4m3 [blocks of rows, blocks of inputs]; or [out_features, blocks of inputs] if rows of a block have
            different scales. For 4 bits, as in `four_bits_reference`.
    """

    __slots__ = ("_dequantise", "bias", "scales", "shape", "weight")

    def __init__(self, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Take a weight [out_features, in_features] in float8_e4m3fn, or codes of 4 bits, and scales for each row."""
        self.shape: tuple[int, int] = (values.shape[0], values.shape[1])
        is_fp8 = values.dtype is torch.float8_e4m3fn
        self.weight = packed(values) if is_fp8 else packed_codes(values)
        self.scales = by_blocks(scales) if is_fp8 else packed_scales(scales)
        self.bias = bias
        self._dequantise: Dequantise = widen_reference

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self._widened(rows), self.bias)

    def add_to(self, stream: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        assert self.bias is None
        return stream.addmm_(rows, self._widened(rows).t())

    def _widened(self, rows: torch.Tensor) -> torch.Tensor:
        wide = rows.new_empty(self.shape)
        self._dequantise(wide, self.weight, self.scales)
        return wide

    def widened_by(self, dequantise: Dequantise) -> NarrowLinear:
        other = copy(self)
        other._dequantise = dequantise
        return other


def by_blocks(scales: torch.Tensor) -> torch.Tensor:
    """Return one row of scales for each block of 128 rows; return `scales` if rows of a block have different scales.

    This can occur if several projections are fused, since a projection's blocks need not align with those of the whole.
    """
    of_blocks = scales[::BLOCK_SIZE].contiguous()
    same = torch.equal(of_blocks.repeat_interleave(BLOCK_SIZE, dim=0)[: len(scales)], scales)
    return of_blocks if same else scales


class PackedLinear:
    """A product with a weight in oneDNN's blocked layout, by the operator that torch.compile's CPU freezing uses."""

    __slots__ = ("_product", "bias", "packed")

    # One layout for all row counts: packing for another count could choose another layout, which rounds differently.
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
    """Return whether `weight` should be packed for oneDNN: float32, on a CPU, and not trained.

    Warn if this torch cannot pack it. A weight in training changes with every step, so it is not packed.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.requires_grad:
        return False
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return True
    warnings.warn("this torch cannot pack weights for oneDNN; float32 products on the CPU are slower", stacklevel=2)
    return False


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None, scales: torch.Tensor | None = None) -> Linear:
    """Make a product by torch for a weight [out_features, in_features]. A narrow weight has `scales` for
    each of its rows (`checkpoints.keep_narrow`)."""
    if scales is not None:
        return NarrowLinear(weight, scales, bias)
    return PackedLinear(weight, bias) if can_pack(weight) else DenseLinear(weight, bias)


def fused_linear(
    weights: list[torch.Tensor], biases: list[torch.Tensor] | None = None, scales: list[torch.Tensor] | None = None
) -> Linear:
    """Make one product for several projections of the same rows. Weights, biases and scales are stacked along the
    output."""
    bias, of_rows = (torch.cat(parts) if parts else None for parts in (biases, scales))
    return make_linear(torch.cat(weights), bias, of_rows)


Activation = Callable[[torch.Tensor], torch.Tensor]


def gelu_tanh(rows: torch.Tensor) -> torch.Tensor:
    """Compute Gemma's activation: GELU in its tanh approximation."""
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
