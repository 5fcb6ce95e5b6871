"""The norm of Gemma 4: it multiplies by its weight in float32, and rounds once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class Float32Norm:
    """RMSNorm whose weight, float32, is multiplied before the result is rounded."""

    weight: torch.Tensor
    eps: float

    @classmethod
    def of(cls, weight: torch.Tensor, eps: float) -> Float32Norm:
        return cls(weight.float(), eps)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return (F.rms_norm(rows.float(), rows.shape[-1:], None, self.eps) * self.weight).to(rows.dtype)
