"""The norm of Gemma 4: it multiplies by its weight in float32, and rounds once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class Float32Norm:
    """RMSNorm in float32, its weight as well; the plain one rounds before it multiplies by the weight."""

    weight: torch.Tensor
    eps: float

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(rows, rows.shape[-1:], self.weight, self.eps)
