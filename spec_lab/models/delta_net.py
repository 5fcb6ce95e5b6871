"""The gated delta net of Qwen3-Next and Qwen3.5: a layer's attention that keeps a state instead of keys and values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from spec_lab.core.protocols import RowSelection
from spec_lab.core.ragged import in_even_batches
from spec_lab.core.recurrent_cache import ConvWindows, RecurrentRows
from spec_lab.core.types import AttentionMetadata
from spec_lab.models.delta_caches import DeltaCache
from spec_lab.models.delta_rule import DeltaRows
from spec_lab.models.delta_sizes import DeltaNetSizes
from spec_lab.models.layers import RotaryRows, fused_linear
from spec_lab.models.linear import Linear
from spec_lab.models.partition import WHOLE, Partition

L2_EPS = 1e-6


def build_delta_net(
    sizes: DeltaNetSizes, tensors: Mapping[str, torch.Tensor], prefix: str, eps: float, partition: Partition = WHOLE
) -> GatedDeltaNet:
    """Build a delta net from Hugging Face names below `prefix` (ending in `linear_attn.`)."""
    inputs = [tensors[f"{prefix}in_proj_{name}.weight"] for name in ("qkv", "z", "b", "a")]
    return GatedDeltaNet(
        sizes=sizes,
        inputs=fused_linear(inputs),
        output=partition.output(tensors[f"{prefix}out_proj.weight"]),
        conv_weight=tensors[f"{prefix}conv1d.weight"].squeeze(1),
        log_rate=tensors[f"{prefix}A_log"],
        time_bias=tensors[f"{prefix}dt_bias"],
        norm_weight=tensors[f"{prefix}norm.weight"],
        eps=eps,
    )


class GatedDeltaNet:
    """Stands where another layer has attention. It reads no positions: a row's place is the state it finds."""

    __slots__ = (
        "_conv_weight",
        "_eps",
        "_group",
        "_input_sizes",
        "_inputs",
        "_norm_weight",
        "_output",
        "_rate",
        "_sizes",
        "_time_bias",
    )

    def __init__(
        self,
        sizes: DeltaNetSizes,
        inputs: Linear,
        output: Linear,
        conv_weight: torch.Tensor,
        log_rate: torch.Tensor,
        time_bias: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
    ) -> None:
        """`inputs`: one product for queries, keys and values (conv_size), the gate (value_size), and strength and time
        step (num_value_heads each); conv_weight [conv_size, kernel_size], norm_weight [value_head_dim], and log_rate
        and time_bias [num_value_heads] in float32."""
        assert log_rate.dtype == time_bias.dtype == torch.float32
        self._sizes = sizes
        self._group = sizes.num_value_heads // sizes.num_key_heads
        self._input_sizes = (sizes.conv_size, sizes.value_size, sizes.num_value_heads, sizes.num_value_heads)
        self._inputs = inputs
        self._output = output
        self._conv_weight = conv_weight.float()
        self._rate = log_rate.exp()
        self._time_bias = time_bias
        self._norm_weight = norm_weight
        self._eps = eps

    def __call__(
        self,
        rows: torch.Tensor,
        rotary: RotaryRows,
        cache: DeltaCache,
        metadata: AttentionMetadata,
        selection: RowSelection,
    ) -> torch.Tensor:
        """Take all rows into the states, and return [kept rows, hidden_size]. At least one row has to go on."""
        outputs, gate = self._run(rows, cache, metadata)
        return self._output(self._gated(selection.residual(outputs), selection.residual(gate)).flatten(1))

    def write(self, rows: torch.Tensor, rotary: RotaryRows, cache: DeltaCache, metadata: AttentionMetadata) -> None:
        """Take all rows into the states, and nothing else: for a layer whose output nobody reads."""
        self._run(rows, cache, metadata)

    def _run(
        self, rows: torch.Tensor, cache: DeltaCache, metadata: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs of the rule in float32, and the gate, both [rows, num_value_heads, value_head_dim]."""
        raw, gate, strength, time_step = self._inputs(rows).split(self._input_sizes, dim=-1)
        outputs = in_even_batches(
            lambda batch: self._scan(
                raw[batch.rows], strength[batch.rows], time_step[batch.rows], cache, batch.metadata
            ),
            metadata,
        )
        return outputs, gate.unflatten(-1, (self._sizes.num_value_heads, self._sizes.value_head_dim))

    def _scan(
        self,
        raw: torch.Tensor,
        strength: torch.Tensor,
        time_step: torch.Tensor,
        cache: DeltaCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Take the rows of an even batch into the states: their outputs [rows, num_value_heads, value_head_dim]."""
        slots = metadata.recurrent
        assert slots is not None, "whoever runs a target with recurrent layers says which slots its rows are of"
        by_request = (-1, metadata.num_queries)
        mixed = self._convolve(raw.unflatten(0, by_request), cache.windows, slots)
        log_decay = -self._rate * F.softplus(time_step.unflatten(0, by_request).float() + self._time_bias)
        inputs = self._heads(mixed, log_decay, strength.unflatten(0, by_request).float().sigmoid())
        outputs = cache.prompt(inputs, slots) if slots.is_prompt else cache.verify(inputs, slots)
        return outputs.flatten(0, 1)

    def _convolve(self, raw: torch.Tensor, windows: ConvWindows, slots: RecurrentRows) -> torch.Tensor:
        """Run silu of the causal convolution over raw [batch, num_rows, conv_size] and the rows before it, and leave in
        the windows what will precede later rows.

        Behind verify, column r + i of a window is for each row r the i-th of the rows that precede the next one.
        """
        history = self._sizes.history
        known = torch.cat((windows.read(slots, history), raw), dim=1)
        windows.write(slots, known[:, -history:] if slots.is_prompt else known[:, 1:])
        seen = known.float().unfold(1, self._sizes.kernel_size, 1)  # [batch, num_rows, conv_size, kernel_size]
        return F.silu((seen * self._conv_weight).sum(-1)).to(raw.dtype)

    def _heads(self, mixed: torch.Tensor, log_decay: torch.Tensor, strength: torch.Tensor) -> DeltaRows:
        """Cut mixed [batch, num_rows, conv_size] into heads; queries and keys have unit length, and serve the value
        heads of their group."""
        sizes = self._sizes
        queries, keys, values = mixed.float().split((sizes.key_size, sizes.key_size, sizes.value_size), dim=-1)
        return DeltaRows(
            queries=self._unit(queries) * sizes.key_head_dim**-0.5,
            keys=self._unit(keys),
            values=values.unflatten(-1, (sizes.num_value_heads, sizes.value_head_dim)),
            log_decay=log_decay,
            strength=strength,
        )

    def _unit(self, rows: torch.Tensor) -> torch.Tensor:
        heads = rows.unflatten(-1, (self._sizes.num_key_heads, self._sizes.key_head_dim))
        heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + L2_EPS)
        return heads.repeat_interleave(self._group, dim=-2)

    def _gated(self, outputs: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Norm each head of float32 outputs, and multiply by silu of the gate: [rows, num_value_heads,
        value_head_dim]."""
        normed = F.rms_norm(outputs, outputs.shape[-1:], None, self._eps).to(gate.dtype) * self._norm_weight
        return (normed * F.silu(gate.float())).to(gate.dtype)
