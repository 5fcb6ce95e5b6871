"""Two kinds of RMSNorm: the usual one, and that of Gemma 4, Qwen3.5 and Qwen3-Next.

The usual one rounds to the rows' dtype before it multiplies by its weight, and again after. The other multiplies in
float32 and rounds once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F


class RowsPart(Protocol):
    """A function that maps rows to as many rows: a norm, or a part of a layer other than attention."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...


class WeightedNorm(RowsPart, Protocol):
    """An RMSNorm whose weight kernels can read."""

    @property
    def weight(self) -> torch.Tensor: ...

    @property
    def eps(self) -> float: ...

    @property
    def kernel_weight(self) -> torch.Tensor:
        """[size], in the rows' dtype if the norm rounds both before and after it multiplies by the weight, else
        float32."""
        ...


@dataclass(slots=True)
class RMSNorm:
    """Computes x / rms(x) * weight over the last dimension."""

    weight: torch.Tensor
    eps: float

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(rows, rows.shape[-1:], None, self.eps) * self.weight

    @property
    def kernel_weight(self) -> torch.Tensor:
        """The weight for kernels. It has the rows' dtype, so kernels round before and after they multiply by it."""
        return self.weight


@dataclass(frozen=True, slots=True)
class Float32Norm:
    """RMSNorm that multiplies by its weight in float32, and rounds once.

    Attributes:
        weight: in the rows' dtype, or in float32 if their dtype is too coarse, as for 1 + w with a small w (Qwen3.5).
    """

    weight: torch.Tensor
    eps: float

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(rows.to(self.weight.dtype), rows.shape[-1:], self.weight, self.eps).to(rows.dtype)

    @property
    def kernel_weight(self) -> torch.Tensor:
        """The weight for kernels. It is float32, so kernels round only after they multiply by it."""
        return self.weight.float()


@dataclass(frozen=True, slots=True)
class Float32HeadNorm:
    """A `Float32Norm` over the heads of a row, with a separate weight for each head.

    Attributes:
        weight: [num_heads, head_dim] float32.
    """

    weight: torch.Tensor
    eps: float

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return (F.rms_norm(rows.float(), rows.shape[-1:], None, self.eps) * self.weight).to(rows.dtype)


@dataclass(frozen=True, slots=True)
class WideHeadNorm:
    """An RMSNorm over all query heads of a row together, and one over all its key heads.

    Attributes:
        weight: [num_heads + num_kv_heads, head_dim].
    """

    weight: torch.Tensor
    num_heads: int
    eps: float

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Norm heads [rows, num_heads + num_kv_heads, head_dim]."""
        halves = rows[:, : self.num_heads], rows[:, self.num_heads :]
        normed = [F.rms_norm(half.contiguous(), half.shape[1:], None, self.eps) for half in halves]
        return torch.cat(normed, dim=1) * self.weight


def make_norm(weight: torch.Tensor, eps: float, in_float32: bool) -> WeightedNorm:
    """Make one of the two kinds of RMSNorm (`LayerPlan.float32_norms`)."""
    return Float32Norm(weight, eps) if in_float32 else RMSNorm(weight, eps)


def head_weights(q_weight: torch.Tensor, k_weight: torch.Tensor, num_heads: int, num_kv_heads: int) -> torch.Tensor:
    """Return the norm weights of all query and key heads, [num_heads + num_kv_heads, head_dim]."""
    return torch.cat((q_weight.expand(num_heads, -1), k_weight.expand(num_kv_heads, -1)))


def per_head_norm(weight: torch.Tensor, eps: float, in_float32: bool) -> RowsPart:
    """Make one RMSNorm for all heads, each of which has a row of `weight`."""
    return Float32HeadNorm(weight, eps) if in_float32 else RMSNorm(weight, eps)


def rounded(scale: float, dtype: torch.dtype) -> float:
    """Round a factor to `dtype`, the type of the weights that it multiplies."""
    return float(torch.tensor(scale, dtype=dtype))
