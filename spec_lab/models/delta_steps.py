"""The steps of a gated delta net between its products, in torch: the inputs of the delta rule, and the norm after it.

`triton_delta` has the same steps as kernels. The rule itself is in `delta_rule`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from spec_lab.checkpoints.plan import DeltaNetSizes
from spec_lab.core.recurrent_cache import ConvWindows, RecurrentRows
from spec_lab.models.delta_rule import DeltaRows

L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaNetWeights:
    """The weights of a gated delta net, except those of its two products.

    Attributes:
        conv_weight: [conv_size, kernel_size] float32.
        rate: [num_value_heads] float32, exp of A_log.
        time_bias: [num_value_heads] float32.
        norm_weight: [value_head_dim] in the model's dtype.
    """

    sizes: DeltaNetSizes
    conv_weight: torch.Tensor
    rate: torch.Tensor
    time_bias: torch.Tensor
    norm_weight: torch.Tensor
    eps: float


class DeltaSteps(Protocol):
    """The steps before and after the delta rule. The inputs of the rule have the form that the caches of the same
    kernels take."""

    def inputs(self, projected: torch.Tensor, windows: ConvWindows, slots: RecurrentRows) -> Any:
        """Turn [batch, num_rows, projected_size] into the inputs of the rule, and update the convolution windows.

        After verify, the window that follows row r begins at column r: column r + i holds the i-th of the inputs that
        precede row r + 1.
        """
        ...

    def gated(self, outputs: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Norm each head of float32 outputs, multiply by silu of the gate, and return [rows, num_value_heads,
        value_head_dim]."""
        ...


@dataclass(frozen=True, slots=True)
class TorchDeltaSteps:
    """The steps in torch operators."""

    weights: DeltaNetWeights

    def inputs(self, projected: torch.Tensor, windows: ConvWindows, slots: RecurrentRows) -> DeltaRows:
        raw, _, strength, time_step = projected.split(self.weights.sizes.projected_sizes, dim=-1)
        mixed = self._convolve(raw, windows, slots)
        log_decay = -self.weights.rate * F.softplus(time_step.float() + self.weights.time_bias)
        return self._heads(mixed, log_decay, strength.float().sigmoid())

    def gated(self, outputs: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(outputs, outputs.shape[-1:], None, self.weights.eps).to(gate.dtype)
        return (normed * self.weights.norm_weight * F.silu(gate.float())).to(gate.dtype)

    def _convolve(self, raw: torch.Tensor, windows: ConvWindows, slots: RecurrentRows) -> torch.Tensor:
        """Return silu of the causal convolution over raw [batch, num_rows, conv_size] and the inputs before it."""
        sizes = self.weights.sizes
        known = torch.cat((windows.read(slots, sizes.history), raw), dim=1)
        windows.write(slots, known[:, -sizes.history :] if slots.is_prompt else known[:, 1:])
        seen = known.float().unfold(1, sizes.kernel_size, 1)  # [batch, num_rows, conv_size, kernel_size]
        return F.silu((seen * self.weights.conv_weight).sum(-1)).to(raw.dtype)

    def _heads(self, mixed: torch.Tensor, log_decay: torch.Tensor, strength: torch.Tensor) -> DeltaRows:
        """Split mixed [batch, num_rows, conv_size] into heads. Scale keys to unit length, and queries to length
        1 / sqrt(key_head_dim)."""
        sizes = self.weights.sizes
        queries, keys, values = mixed.float().split((sizes.key_size, sizes.key_size, sizes.value_size), dim=-1)
        return DeltaRows(
            queries=self._unit(queries) * sizes.key_head_dim**-0.5,
            keys=self._unit(keys),
            values=values.unflatten(-1, (sizes.num_value_heads, sizes.value_head_dim)),
            log_decay=log_decay,
            strength=strength,
        )

    def _unit(self, rows: torch.Tensor) -> torch.Tensor:
        heads = rows.unflatten(-1, (self.weights.sizes.num_key_heads, self.weights.sizes.key_head_dim))
        return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + L2_EPS)
