"""The parts of layers with kernels=triton: products of few rows fused with norms, activations and residuals, and parts
for many rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F

from spec_kernels.gate import gated
from spec_kernels.norms import add_normed, rms_norm
from spec_kernels.product import product
from spec_kernels.product_tiles import INVARIANT_ROWS, MAX_ROWS, most_rows, num_arrivals
from spec_kernels.widen import widen
from spec_lab.models.linear import Activation, GatedMLP, Linear, StreamedLinear, gelu_tanh
from spec_lab.models.norms import WeightedNorm
from spec_lab.operators.prompt_rounding import are_few, filled

ACTIVATIONS: dict[Activation, str] = {F.silu: "silu", gelu_tanh: "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class TritonNorm:
    """An RMSNorm in one launch."""

    weight: torch.Tensor
    eps: float

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return rms_norm(rows, self.weight, self.eps)

    @property
    def kernel_weight(self) -> torch.Tensor:
        return self.weight

    @classmethod
    def of(cls, norm: WeightedNorm) -> TritonNorm:
        return cls(norm.kernel_weight, norm.eps)


class SkinnyProduct:
    """A product of up to 64 rows with fused parts. A norm may come before it. After it a residual may be added, or an
    activation be applied and multiplied by the other half of the outputs or by other rows.

    With a fused norm each program norms the rows again. So with more than 16 rows a separate kernel for the norm is
    cheaper.
    """

    __slots__ = (
        "_activation",
        "_arrivals",
        "_bias",
        "_eps",
        "_gated",
        "_norm",
        "_norm_weight",
        "_scales",
        "_weight",
    )

    def __init__(
        self,
        linear: StreamedLinear,
        norm: WeightedNorm | None = None,
        gated: bool = False,
        activation: Activation = F.silu,
    ) -> None:
        self._weight, self._scales, self._bias = linear.weight, linear.scales, linear.bias
        self._norm = None if norm is None else TritonNorm.of(norm)
        self._norm_weight = None if norm is None else norm.kernel_weight.float()
        self._eps = 0.0 if norm is None else norm.eps
        self._gated = gated
        self._activation = ACTIVATIONS[activation]
        self._arrivals = no_arrivals(linear.shape[0] // (2 if gated else 1), linear.weight.device)

    def __call__(
        self, rows: torch.Tensor, residual: torch.Tensor | None = None, multiplied: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`residual` is added to the result; the activation of the product is multiplied by `multiplied`."""
        norm_weight = self._norm_weight
        if self._norm is not None and rows.shape[0] > INVARIANT_ROWS:
            rows, norm_weight = self._norm(rows), None
        return product(
            rows,
            self._weight,
            self._arrivals,
            self._bias,
            norm_weight,
            self._eps,
            residual,
            self._gated,
            self._activation,
            multiplied,
            self._scales,
        )


def no_arrivals(out_features: int, device: torch.device) -> torch.Tensor:
    """Make the counters, all 0, by which a product's programs find out which of them finishes last."""
    return torch.zeros(num_arrivals(out_features), dtype=torch.int32, device=device)


class SkinnyLinear:
    """A product, with a norm before it if one is given. The kernel computes few rows. The library computes many, and a
    narrow weight is converted to the rows' dtype for it."""

    __slots__ = ("_few", "_many", "_max_rows", "_norm")

    def __init__(self, linear: StreamedLinear, max_rows: int = MAX_ROWS, norm: WeightedNorm | None = None) -> None:
        self._few = SkinnyProduct(linear, norm)
        self._many = linear.widened_by(widen)
        self._norm = None if norm is None else TritonNorm.of(norm)
        self._max_rows = min(max_rows, most_rows(*linear.shape, linear.scales is not None))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if are_few(rows, self._max_rows):
            return self._few(rows)
        return self._many(rows if self._norm is None else self._norm(rows))


@dataclass(frozen=True, slots=True)
class TritonGatedMLP:
    """A gated MLP for many rows: the library's products with one kernel between them."""

    gate_up: StreamedLinear
    down: StreamedLinear
    activation: Activation

    @classmethod
    def of(cls, mlp: GatedMLP) -> TritonGatedMLP:
        """Make one from `mlp`. A kernel converts its narrow weights for the library's products."""
        gate_up, down = (dense(linear).widened_by(widen) for linear in (mlp.gate_up, mlp.down))
        return cls(gate_up, down, mlp.activation)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down(self._inner(rows))

    def add_to(self, stream: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Add the MLP's output to `stream`, and return the sum. The library's product adds it as it writes, which saves
        a pass. The sum is in `stream` itself, unless `filled` pads it: then `stream` stays as it was."""
        whole = filled(stream)
        added = self.down.add_to(whole, self._inner(filled(rows)))
        return added if whole is stream else added[: len(stream)]

    def _inner(self, rows: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(rows).chunk(2, dim=-1)
        return gated(gate, up, ACTIVATIONS[self.activation])


class SkinnyMLP:
    """A gated MLP in which the gate is fused into the first product if rows are few."""

    __slots__ = ("_down", "_gate_up", "_many", "_max_rows")

    def __init__(self, mlp: GatedMLP, max_rows: int = MAX_ROWS) -> None:
        self._gate_up = SkinnyProduct(dense(mlp.gate_up), gated=True, activation=mlp.activation)
        self._down = SkinnyProduct(dense(mlp.down))
        self._many = TritonGatedMLP.of(mlp)
        self._max_rows = max_rows

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._down(self._gate_up(rows)) if are_few(rows, self._max_rows) else self._many(rows)


class AddMLP:
    """Adds a gated MLP to the stream.

    Few rows (`are_few`, up to `max_rows`) use our products, which apply `norm` to their input if it is given. Others
    use the library's, whose input must be normed.
    """

    __slots__ = ("_down", "_gate_up", "_many", "_max_rows")

    def __init__(self, mlp: GatedMLP, max_rows: int, norm: WeightedNorm | None = None) -> None:
        self._gate_up = SkinnyProduct(dense(mlp.gate_up), norm, gated=True)
        self._down = SkinnyProduct(dense(mlp.down))
        self._many = TritonGatedMLP.of(mlp)
        self._max_rows = max_rows

    def __call__(self, stream: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if are_few(stream, self._max_rows):
            return self._down(self._gate_up(rows), stream)
        return self._many.add_to(stream, rows)


@dataclass(frozen=True, slots=True)
class AddProduct:
    """The end of a layer's first half for few rows: it adds a product to the stream. The second half applies its own
    norm."""

    product: SkinnyProduct

    def __call__(self, mixed: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stream = self.product(mixed, residual)
        return stream, stream


@dataclass(frozen=True, slots=True)
class TritonAddThenNorm:
    """`AddThenNorm` as the library's product and one kernel."""

    product: Linear
    norm: WeightedNorm

    def __call__(self, mixed: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return add_normed(residual, self.product(mixed), None, 0.0, None, self.norm.weight, self.norm.eps)


def dense(linear: Linear) -> StreamedLinear:
    """Return `linear` as a product whose weight has the layout that the kernels read. On a GPU, every product that
    is not split over processes has it."""
    assert hasattr(linear, "weight"), "a packed or split product has no kernel"
    return cast(StreamedLinear, linear)
