"""RMSNorms of two kinds: the usual one, and that of Gemma 4, Qwen3.5 and Qwen3-Next.

The usual one rounds to the rows' dtype before it multiplies by its weight, and again behind it. The other multiplies in
float32, and rounds once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F


class RowsPart(Protocol):
    """Turns each row by itself: a norm, or the part of a layer behind attention."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...


class WeightedNorm(RowsPart, Protocol):
    """An RMSNorm as kernels read it."""

    @property
    def weight(self) -> torch.Tensor: ...

    @property
    def eps(self) -> float: ...

    @property
    def kernel_weight(self) -> torch.Tensor:
        """[size], of the rows' dtype where the norm rounds before its weight and behind it, else float32."""
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
        """The weight as kernels take it, which round before one of the rows' dtype."""
        return self.weight


@dataclass(frozen=True, slots=True)
class Float32Norm:
    """RMSNorm in float32, its weight as well; the plain one rounds before it multiplies by the weight.

    Attributes:
        weight: of the rows' dtype, or float32 where that one cannot hold it: 1 + w of a small w (Qwen3.5).
    """

    weight: torch.Tensor
    eps: float

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(rows.to(self.weight.dtype), rows.shape[-1:], self.weight, self.eps).to(rows.dtype)

    @property
    def kernel_weight(self) -> torch.Tensor:
        """The weight as kernels take it, which round behind a float32 one alone."""
        return self.weight.float()


@dataclass(frozen=True, slots=True)
class Float32HeadNorm:
    """The same over the heads of a row, of which each has a weight of its own.

    Attributes:
        weight: [num_heads, head_dim] float32.
    """

    weight: torch.Tensor
    eps: float

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return (F.rms_norm(rows.float(), rows.shape[-1:], None, self.eps) * self.weight).to(rows.dtype)


def make_norm(weight: torch.Tensor, eps: float, in_float32: bool) -> WeightedNorm:
    """Make the RMSNorm of a family: in float32 up to its weight, or rounded before it (`LayerPlan.float32_norms`)."""
    return Float32Norm(weight, eps) if in_float32 else RMSNorm(weight, eps)


def head_weights(q_weight: torch.Tensor, k_weight: torch.Tensor, num_heads: int, num_kv_heads: int) -> torch.Tensor:
    """Return the weights of the norms of query and key heads together: [num_heads + num_kv_heads, head_dim]."""
    return torch.cat((q_weight.expand(num_heads, -1), k_weight.expand(num_kv_heads, -1)))


def per_head_norm(weight: torch.Tensor, eps: float, in_float32: bool) -> RowsPart:
    """Make one RMSNorm over all heads, of which each has a row of `weight`."""
    return Float32HeadNorm(weight, eps) if in_float32 else RMSNorm(weight, eps)
