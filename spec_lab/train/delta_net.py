"""The gated delta net of Qwen3.5 as trained: all chunks of a row at once, and only their states one after another.

The rule and its chunked form are those of `spec_lab.models.delta_rule`; here they are made of matrix products alone,
which a GPU's backward pass likes better than triangular solves.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_lab.checkpoints.delta_sizes import DeltaNetSizes
from spec_lab.models.delta_steps import L2_EPS
from spec_lab.train.layers import TrainableRMSNorm

CHUNK_SIZE = 64
SHORTEST_STEP, LONGEST_STEP = 1e-3, 1e-1
"""Time steps that heads begin with, as in Mamba-2: some states fade within tens of tokens, some within thousands."""


class TrainableDeltaNet(nn.Module):
    """The layer under the names of its checkpoint, `linear_attn.*`."""

    def __init__(self, sizes: DeltaNetSizes, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.sizes = sizes
        self.in_proj_qkv = nn.Linear(hidden_size, sizes.conv_size, bias=False)
        self.in_proj_z = nn.Linear(hidden_size, sizes.value_size, bias=False)
        self.in_proj_b = nn.Linear(hidden_size, sizes.num_value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden_size, sizes.num_value_heads, bias=False)
        self.conv1d = nn.Conv1d(sizes.conv_size, sizes.conv_size, sizes.kernel_size, groups=sizes.conv_size, bias=False)
        rates = torch.linspace(1.0, 16.0, sizes.num_value_heads)
        steps = torch.logspace(math.log10(LONGEST_STEP), math.log10(SHORTEST_STEP), sizes.num_value_heads)
        self.A_log = nn.Parameter(rates.log())
        self.dt_bias = nn.Parameter(steps.expm1().log())  # softplus of it is the step
        self.norm = TrainableRMSNorm(sizes.value_head_dim, eps)
        self.out_proj = nn.Linear(sizes.value_size, hidden_size, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Turn `[batch, rows, hidden]` into the same; rows before the first one are zero."""
        sizes = self.sizes
        mixed = F.silu(self._convolve(self.in_proj_qkv(rows).float()))
        queries, keys, values = mixed.split([sizes.key_size, sizes.key_size, sizes.value_size], dim=-1)
        log_decay = -self.A_log.exp() * F.softplus(self.in_proj_a(rows).float() + self.dt_bias)
        outputs = gated_delta_rule(
            self._unit(queries) * sizes.key_head_dim**-0.5,
            self._unit(keys),
            values.unflatten(-1, (sizes.num_value_heads, sizes.value_head_dim)),
            log_decay,
            self.in_proj_b(rows).float().sigmoid(),
        )
        gate = self.in_proj_z(rows).float().unflatten(-1, (sizes.num_value_heads, sizes.value_head_dim))
        return self.out_proj((self.norm(outputs) * F.silu(gate)).flatten(-2))

    def _convolve(self, raw: Tensor) -> Tensor:
        """Convolve each channel causally, as a sum over the rows that it sees."""
        length, history = raw.shape[1], self.sizes.history
        known = F.pad(raw, (0, 0, history, 0))
        weight = self.conv1d.weight[:, 0]
        mixed = known[:, :length] * weight[:, 0]
        for behind in range(1, history + 1):
            mixed = mixed + known[:, behind : behind + length] * weight[:, behind]
        return mixed

    def _unit(self, rows: Tensor) -> Tensor:
        heads = rows.unflatten(-1, (self.sizes.num_key_heads, self.sizes.key_head_dim))
        heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + L2_EPS)
        return heads.repeat_interleave(self.sizes.num_value_heads // self.sizes.num_key_heads, dim=-2)


def gated_delta_rule(
    queries: Tensor, keys: Tensor, values: Tensor, log_decay: Tensor, strength: Tensor, chunk_size: int = CHUNK_SIZE
) -> Tensor:
    """Apply the rule over whole rows from a state of zeros, in float32: `[batch, rows, heads, value_head_dim]`.

    `queries` and `keys` `[batch, rows, heads, key_head_dim]`, `values` `[batch, rows, heads, value_head_dim]`,
    `log_decay` and `strength` `[batch, rows, heads]`; see `spec_lab.models.delta_rule`, whose letters the comments use.
    """
    with torch.autocast(queries.device.type, enabled=False):
        num_rows = queries.shape[1]
        parts = [queries, keys, values, log_decay.unsqueeze(-1), strength.unsqueeze(-1)]
        # [batch, heads, chunks, chunk_size, width]; padding neither fades nor writes
        padding = (0, 0, 0, 0, 0, -num_rows % chunk_size)
        q, k, v, g, beta = (
            F.pad(part, padding).unflatten(1, (-1, chunk_size)).permute(0, 3, 1, 2, 4).contiguous() for part in parts
        )
        earlier = torch.ones(chunk_size, chunk_size, device=q.device).tril()
        decay = earlier @ g  # log D_i
        later = earlier == 0
        between = (decay - decay.transpose(-1, -2)).masked_fill(later, float("-inf")).exp()
        inverse: Tensor = UnitLowerInverse.apply(beta * between * (k @ k.transpose(-1, -2)))  # type: ignore[no-untyped-call]
        new_values = inverse @ (beta * v)
        answered = inverse @ (beta * decay.exp() * k)  # times the state: what the u_i take back
        within = between * (q @ k.transpose(-1, -2))
        k_to_end = (k * (decay[..., -1:, :] - decay).exp()).transpose(-1, -2)
        # A chunk leaves kept @ state + written of the state that it finds, so only that goes chunk by chunk.
        kept = torch.eye(k.shape[-1], device=k.device) * decay[..., -1:, :].exp() - k_to_end @ answered
        states = states_before(kept, k_to_end @ new_values)
        outputs = within @ new_values + (q * decay.exp() - within @ answered) @ states
        return outputs.flatten(2, 3).transpose(1, 2)[:, :num_rows].contiguous()


def states_before(kept: Tensor, written: Tensor) -> Tensor:
    """Return the state `[batch, heads, chunks, key, value]` that each chunk finds, the first one zeros.

    A chunk makes `kept @ state + written` of it, `kept` `[batch, heads, chunks, key, key]` and `written` of the states'
    shape. What the last chunk makes is of no use.
    """
    batch = kept.shape[:2]
    kept, written = kept.flatten(0, 1), written.flatten(0, 1)
    states = [torch.zeros_like(written[:, 0])]
    for chunk in range(kept.shape[1] - 1):
        states.append(torch.baddbmm(written[:, chunk], kept[:, chunk], states[-1]))
    return torch.stack(states, dim=1).unflatten(0, batch)


class UnitLowerInverse(torch.autograd.Function):
    """`inverse_of_unit_lower` with a gradient of two products with the inverse itself, whatever steps led to it."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        inverse = inverse_of_unit_lower(matrix)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        turned = ctx.saved_tensors[0].transpose(-1, -2)
        return -(turned @ gradient @ turned).tril(-1)


def inverse_of_unit_lower(matrix: Tensor, smallest: int = 16) -> Tensor:
    """Return the inverse of `[..., size, size]` matrices with ones on the diagonal and `matrix`'s entries below it.

    Blocks on the diagonal are inverted two by two, each twice as large as the ones before: of [[A, 0], [C, B]] the
    corner is -B^-1 C A^-1. So errors do not grow as those of a power series would. `size` is a power of two; blocks up
    to `smallest` are inverted by themselves, since the zeros beside them cost as much as numbers.
    """
    size = matrix.shape[-1]
    if size <= smallest:
        block, inverse = 1, torch.eye(size, device=matrix.device, dtype=matrix.dtype)
    else:
        num_blocks = size // smallest
        blocks = matrix.unflatten(-1, (num_blocks, smallest)).unflatten(-3, (num_blocks, smallest))
        diagonal = torch.stack([blocks[..., i, :, i, :] for i in range(num_blocks)], dim=-3)
        apart = torch.eye(num_blocks, device=matrix.device, dtype=matrix.dtype)[:, None, :, None]
        inverse = (inverse_of_unit_lower(diagonal, smallest).unsqueeze(-2) * apart).flatten(-2).flatten(-3, -2)
        block = smallest
    index = torch.arange(size, device=matrix.device)
    while block < size:
        row, column = index[:, None] // block, index[None, :] // block
        corner = matrix * ((row == column + 1) & (row % 2 == 1))
        inverse = inverse - inverse @ corner @ inverse
        block *= 2
    return inverse
