"""Draft layers written from their definition, as references: one row at a time, a list of key-value rows, no batch and
no mask.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_lab.train.layers import SelfAttention, SwiGLU


def norm(hidden: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return (hidden.double() / (hidden.double().pow(2).mean() + eps).sqrt()) * weight


def rotate(vector: Tensor, position: int, theta: float = 10000.0) -> Tensor:
    """Rotate the pairs (i, i + half) of one head's vector as complex numbers."""
    half = len(vector) // 2
    angles = position * theta ** (-torch.arange(half).double() / half)
    turned = torch.complex(vector[:half].double(), vector[half:].double()) * torch.polar(
        torch.ones(half).double(), angles
    )
    return torch.cat([turned.real, turned.imag])


def feed_forward(mlp: SwiGLU, hidden: Tensor) -> Tensor:
    return mlp.down_proj.weight @ (F.silu(mlp.gate_proj.weight @ hidden) * (mlp.up_proj.weight @ hidden))


class OneRowAttention:
    """Attention over the rows given so far; `theta` is the rotary base, `eps` that of the heads' norms."""

    def __init__(self, attention: SelfAttention, theta: float = 10000.0, eps: float | None = None) -> None:
        self.attention = attention
        self.theta = theta
        self.eps = eps
        self.rows: list[tuple[Tensor, Tensor]] = []

    def row(self, entering: Tensor, position: int) -> Tensor:
        """Append a row, and return what it reads."""
        attention, head_dim = self.attention, self.attention.head_dim
        queries = self._heads(attention.q_proj.weight @ entering, attention.q_norm, position)
        keys = self._heads(attention.k_proj.weight @ entering, attention.k_norm, position)
        self.rows.append((torch.stack(keys), (attention.v_proj.weight @ entering).view(-1, head_dim)))
        outputs = []
        for index, query in enumerate(queries):
            group = index // (len(queries) // len(keys))
            scores = torch.stack([query @ key[group] for key, _ in self.rows])
            weights = (scores / head_dim**0.5).softmax(0)
            outputs.append(sum(weight * value[group] for weight, (_, value) in zip(weights, self.rows, strict=True)))
        return attention.o_proj.weight @ torch.cat(outputs)

    def _heads(self, projected: Tensor, head_norm: torch.nn.Module, position: int) -> list[Tensor]:
        heads = projected.split(self.attention.head_dim)
        if self.eps is not None:
            heads = tuple(norm(head, head_norm.weight, self.eps) for head in heads)
        return [rotate(head, position, self.theta) for head in heads]
