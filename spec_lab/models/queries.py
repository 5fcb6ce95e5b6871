"""Queries of layers that read another layer's keys and values and write none."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.passes import Pass
from spec_lab.models.layers import FusedRopeAndWrite, RopeAndWrite
from spec_lab.models.norms import WeightedNorm


@dataclass(frozen=True, slots=True)
class NormedQueries:
    """Norms and rotates queries in separate steps."""

    norm: WeightedNorm

    def __call__(self, heads: torch.Tensor, at: Pass) -> torch.Tensor:
        return at.rotary(self.norm(heads))


def norm_and_turn_queries(norm: WeightedNorm, num_heads: int, backend: AttentionBackend) -> RopeAndWrite:
    """Return the backend's kernel if it has one, else `NormedQueries`. All heads share the norm's weight [head_dim]."""
    if backend.rope_write is None:
        return NormedQueries(norm)
    weight = norm.kernel_weight.expand(num_heads, -1).contiguous()
    return FusedRopeAndWrite(num_heads, 0, backend.rope_write, norm_weight=weight, eps=norm.eps)
