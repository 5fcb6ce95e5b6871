"""Parts of transformer layers from which trainable drafters are built, under the names of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_lab.checkpoints.plan import RopeConfig
from spec_lab.core.errors import UserError
from spec_lab.models.rope import inverse_frequencies


class TrainableRMSNorm(nn.Module):
    """TrainableRMSNorm that computes in float32, whatever the dtype of its input."""

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
    """Sizes of an attention: `input_size` of the projections' input, `hidden_size` of the output.

    `head_norm_eps`: epsilon of the norm of each query and key head before the rotation, as in Qwen3; None for no norm,
    as in Llama. `has_bias`: the projections of queries, keys and values have a bias, as in Qwen2.
    """

    input_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_norm_eps: float | None = None
    has_bias: bool = False


class SelfAttention(nn.Module):
    """The projections and head norms of an attention. The unrolling decides which rows attend to which."""

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

    def merge(self, attended: Tensor) -> Tensor:
        """Return `[batch, rows, hidden]` from the heads' attention outputs `[batch, heads, rows, head_dim]`."""
        return self.o_proj(attended.transpose(1, 2).flatten(2))


def head_norm(head_dim: int, eps: float | None) -> nn.Module:
    """Return a norm of each head's vector; without `eps` an identity, which has no weights in a checkpoint."""
    return nn.Identity() if eps is None else TrainableRMSNorm(head_dim, eps)


def split_heads(projected: Tensor, head_dim: int) -> Tensor:
    """Return `[batch, heads, rows, head_dim]` from `[batch, rows, heads * head_dim]`."""
    return projected.unflatten(-1, (-1, head_dim)).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary embedding in Llama's half-split layout; `cos` and `sin` are `[batch, 1, rows, width]`, or
    `[1, 1, rows, width]` for one document in each row.

    If heads are wider than `width`, only their first `width` channels are rotated.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, head_dim: int, theta: float, turning_pairs: float = 1.0) -> Rotation:
        """Make the rotation at `positions`. `turning_pairs` is the rotated fraction of pairs (Gemma's
        "proportional")."""
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
    """Computes rotary embeddings on the device, since a captured step may not copy from the host.

    Frequencies are stored as integer bits, so that casting the module to another dtype does not round them.
    """

    bits: Tensor

    def __init__(self, rope: RopeConfig, width: int) -> None:
        """`width`: the number of channels of a head."""
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
