"""The norms of Gemma 4, Qwen3.5 and Qwen3-Next: they multiply by their weight in float32, and round once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


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
