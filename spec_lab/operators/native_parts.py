"""kernels=native: norms, products, and the input and output of a draft head, in C."""

from __future__ import annotations

from typing import Any

import torch

from spec_kernels.native import part_operators as native
from spec_kernels.native.forwards import NativeHead
from spec_kernels.native.parts import NativeNorm, NativeProduct
from spec_lab.models.draft_parts import DraftInput, LikeliestToken
from spec_lab.models.linear import Linear, whole_linear
from spec_lab.models.norms import WeightedNorm
from spec_lab.operators.native_forwards import MAX_ROWS


class NativeRMSNorm:
    """A norm as one C call."""

    __slots__ = ("_norm",)

    def __init__(self, norm: WeightedNorm) -> None:
        self._norm = as_native(norm)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(rows)
        native.rms_norm(out, rows, self._norm.address)
        return out


class NativeLinear:
    """A product in C; many rows are computed `MAX_ROWS` at a time."""

    __slots__ = ("product",)

    def __init__(self, product: NativeProduct) -> None:
        self.product = product

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        out = rows.new_empty(rows.shape[0], self.product.num_outputs)
        for part, of_part in zip(rows.split(MAX_ROWS), out.split(MAX_ROWS), strict=True):
            if len(part):
                native.multiply(of_part, part.contiguous(), self.product.address)
        return out

    @property
    def bias(self) -> torch.Tensor | None:
        return self.product.bias

    def dense_weight(self) -> torch.Tensor:
        return self.product.dense_weight()


class NativeDraftInput:
    """`DraftInput` as one C call."""

    __slots__ = ("embedding", "embedding_norm", "hidden_norm")

    def __init__(self, plain: DraftInput) -> None:
        self.embedding = plain.embedding
        self.embedding_norm = as_native(plain.embedding_norm)
        self.hidden_norm = as_native(plain.hidden_norm)

    def __call__(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows, size = hidden.shape
        out = hidden.new_empty(num_rows, 2 * size)
        native.draft_input(
            out, token_ids, hidden.contiguous(), self.embedding, self.embedding_norm.address, self.hidden_norm.address
        )
        return out, out[:, size:]


class NativeLikeliest:
    """The likeliest token as one C call. For many rows, or with its probability, it is computed part by part.

    Attributes:
        described: the head as the kernels read it.
    """

    __slots__ = ("_parts", "described")

    def __init__(self, plain: LikeliestToken) -> None:
        norm = plain.norm
        head = NativeLinear(packed(plain.head))
        self.described = NativeHead(NativeNorm() if norm is None else as_native(norm), head.product, plain.token_map)
        ours: Any = None if norm is None else NativeRMSNorm(norm)
        self._parts = LikeliestToken(ours, head, plain.token_map)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[0] > MAX_ROWS:
            return self._parts(hidden)
        tokens = torch.empty(hidden.shape[0], dtype=torch.int64)
        native.likeliest(tokens, hidden, *self.described.arguments)
        return tokens

    def with_probability(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._parts.with_probability(hidden)


def packed(linear: Linear) -> NativeProduct:
    whole = whole_linear(linear)
    return NativeProduct(whole.dense_weight(), whole.bias)


def as_native(norm: WeightedNorm) -> NativeNorm:
    return NativeNorm(norm.kernel_weight, norm.eps)
