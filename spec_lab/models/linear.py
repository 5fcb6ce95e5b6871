"""Matrix products with weights fixed for the whole run.

On a CPU in float32 the weight is packed for oneDNN once. Two reasons, both measured on 2 cores with the pocket shapes:
a product of four rows costs a third to an eighth of `F.linear`'s (which goes to MKL), and a row's result is bit-equal
whatever the number of rows beside it. The attention's products are not, so that the logits of verifying N rows and of
decoding one still differ by some 1e-6.
"""

from __future__ import annotations

import warnings
from typing import Protocol

import torch
import torch.nn.functional as F


class Linear(Protocol):
    """Multiplies [rows, in_features] to [rows, out_features]."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...


class DenseLinear:
    """Uses the library's own product."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.weight, self.bias)


class PackedLinear:
    """Keeps the weight in oneDNN's blocked layout: the operator that torch.compile's CPU freezing uses."""

    __slots__ = ("_product", "bias", "packed")

    # One packing for all row counts: packing for a given count would choose another layout, and other rounding.
    _ROWS_HINT = 4

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self._ROWS_HINT)
        self.bias = bias
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._product(rows, self.packed, self.bias, "none", [], "")


def can_pack(weight: torch.Tensor) -> bool:
    """Return whether `weight` is one that oneDNN packs here, and warn where a float32 weight on a CPU cannot be
    packed."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return False
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return True
    warnings.warn("this torch cannot pack weights for oneDNN; float32 products on the CPU are slower", stacklevel=2)
    return False


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Make the fastest product for this weight [out_features, in_features]."""
    return PackedLinear(weight, bias) if can_pack(weight) else DenseLinear(weight, bias)
