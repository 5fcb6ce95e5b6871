"""Pieces of a transformer layer that trained drafters are put together from, under the names of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_lab.checkpoints.plan import RopeConfig
from spec_lab.core.errors import UserError
from spec_lab.models.rope import inverse_frequencies

INITIAL_STD = 0.02
"""Standard deviation of the first weights of matrices in decoders and in what is built from their layers."""


class TrainableRMSNorm(nn.Module):
    """Scale to unit mean square, in float32 whatever the surroundings compute in."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden.float()
        return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.eps) * self.weight


class GatedMLPWeights(nn.Module):
    """The products of a gated feed-forward network, under the names of checkpoints."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)


class SwiGLU(GatedMLPWeights):
    """The gated feed-forward network of Llama and Qwen."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class GatedGELU(GatedMLPWeights):
    """The gated feed-forward network of Gemma."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(hidden), approximate="tanh") * self.up_proj(hidden))


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """`input_size` is what the queries, keys and values are projected from, `hidden_size` what comes out.

    `head_norm_eps`: queries and keys are normed per head before the rotation, as in Qwen3; None leaves them as they
    are, as in Llama. `has_bias`: the three projections add one, as in Qwen2.
    """

    input_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_norm_eps: float | None = None
    has_bias: bool = False


class HeadsAttention(Protocol):
    """The two sides of attention; what attends to what is the business of whoever unrolls or runs the layer."""

    def project(self, hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys, values `[batch, heads, rows, ...]` of rows `[batch, rows, input]`."""

    def merge(self, attended: Tensor, rows: Tensor) -> Tensor:
        """Return `[batch, rows, hidden]` from what the heads read and from the rows that were projected."""


class SelfAttention(nn.Module):
    """Projections and norms of the heads only: what attends to what is the unrolling's business."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.input_size, shape.num_heads * shape.head_dim, bias=shape.has_bias)
        self.k_proj = nn.Linear(shape.input_size, shape.num_kv_heads * shape.head_dim, bias=shape.has_bias)
        self.v_proj = nn.Linear(shape.input_size, shape.num_kv_heads * shape.head_dim, bias=shape.has_bias)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)
        self.q_norm = head_norm(shape.head_dim, shape.head_norm_eps)
        self.k_norm = head_norm(shape.head_dim, shape.head_norm_eps)

    def project(self, hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys, values `[batch, heads, rows, head_dim]`; keys and values repeated for their query
        heads."""
        query = rotation.apply(self.q_norm(split_heads(self.q_proj(hidden), self.head_dim)))
        key = rotation.apply(self.k_norm(split_heads(self.k_proj(hidden), self.head_dim)))
        value = split_heads(self.v_proj(hidden), self.head_dim)
        queries_per_key = query.shape[1] // key.shape[1]
        return query, key.repeat_interleave(queries_per_key, 1), value.repeat_interleave(queries_per_key, 1)

    def merge(self, attended: Tensor, rows: Tensor) -> Tensor:
        """Return `[batch, rows, hidden]` from what the heads read, `[batch, heads, rows, head_dim]`.

        `rows` are those that were projected; only a layer whose output has a gate reads them again.
        """
        return self.o_proj(attended.transpose(1, 2).flatten(2))


def head_norm(head_dim: int, eps: float | None) -> nn.Module:
    """Return a norm of each head's vector, or nothing, which has no name in a checkpoint either."""
    return nn.Identity() if eps is None else TrainableRMSNorm(head_dim, eps)


def split_heads(projected: Tensor, head_dim: int) -> Tensor:
    """Return `[batch, heads, rows, head_dim]` from `[batch, rows, heads * head_dim]`."""
    return projected.unflatten(-1, (-1, head_dim)).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary embedding in the half-split layout of Llama; `cos` and `sin` are `[rows, width]`, or of packed rows
    `[batch, 1, rows, width]`.

    Of heads that are wider the first `width` channels turn, the others stay as they are.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def of_rows(
        cls, num_rows: int, head_dim: int, theta: float, device: torch.device, turning_pairs: float = 1.0
    ) -> Rotation:
        """Place rows at 0.. ; see `at`."""
        return cls.at(torch.arange(num_rows, device=device), head_dim, theta, turning_pairs)

    @classmethod
    def at(cls, positions: Tensor, head_dim: int, theta: float, turning_pairs: float = 1.0) -> Rotation:
        """Only the first part of the pairs turns, where `turning_pairs` is less than 1 (Gemma's "proportional")."""
        frequencies = theta ** (-torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)
        turns = torch.arange(head_dim // 2, device=positions.device) < int(turning_pairs * head_dim // 2)
        angles = positions.float()[..., None] * torch.where(turns, frequencies, 0.0)
        angles = torch.cat([angles, angles], dim=-1)
        return cls(angles.cos(), angles.sin())

    def apply(self, heads: Tensor) -> Tensor:
        """Rotate `[batch, heads, rows, head_dim]`, keeping its dtype."""
        turning, still = heads.split([self.cos.shape[-1], heads.shape[-1] - self.cos.shape[-1]], dim=-1)
        first, second = turning.float().chunk(2, dim=-1)
        turned = turning * self.cos + torch.cat([-second, first], dim=-1) * self.sin
        return torch.cat([turned, still], dim=-1).to(heads.dtype)


class RotaryFrequencies(nn.Module):
    """The rotary embedding of any positions, on the device: nothing may come from the host while a GPU records
    a step. Frequencies are held by their bits, so that a module that is cast to another dtype keeps them whole."""

    bits: Tensor

    def __init__(self, rope: RopeConfig, width: int) -> None:
        """`width`: the channels of what is turned."""
        super().__init__()
        self.amplitude = rope.amplitude
        self.register_buffer("bits", inverse_frequencies(rope, width).view(torch.int32), persistent=False)

    def forward(self, positions: Tensor) -> Rotation:
        """Return the rotation of rows at `positions` `[batch, rows]`."""
        angles = (positions.float()[:, None, :, None] * self.bits.view(torch.float32)).repeat(1, 1, 1, 2)
        return Rotation(self.amplitude * angles.cos(), self.amplitude * angles.sin())


@torch.no_grad()
def leading_directions(embedding: Tensor, width: int) -> Tensor:
    """Return `[hidden, width]`, orthonormal columns: the directions in which `embedding` `[vocab, hidden]` is largest.

    `embedding @ directions` is the best embedding of that width in the least-squares sense.
    """
    hidden_size = embedding.shape[1]
    if width > hidden_size:
        raise UserError(f"drafter.hidden_size={width} is wider than the target's {hidden_size}; lower it")
    values = embedding.double().cpu()
    _, directions = torch.linalg.eigh(values.T @ values)
    return directions.flip(1)[:, :width].to(embedding.device, embedding.dtype)
