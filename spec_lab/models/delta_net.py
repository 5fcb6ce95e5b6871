"""The gated delta net of Qwen3-Next and Qwen3.5, which replaces attention and keeps a state instead of keys and
values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from spec_lab.checkpoints.plan import DeltaNetSizes
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op
from spec_lab.core.passes import Pass
from spec_lab.core.ragged import in_even_batches
from spec_lab.core.types import AttentionMetadata
from spec_lab.models.delta_caches import DeltaCache
from spec_lab.models.delta_steps import DeltaNetWeights, DeltaSteps, TorchDeltaSteps
from spec_lab.models.linear import Linear, fused_linear
from spec_lab.models.norms import RowsPart
from spec_lab.models.partition import WHOLE, Partition


def build_delta_net(
    sizes: DeltaNetSizes,
    tensors: Mapping[str, torch.Tensor],
    prefix: str,
    eps: float,
    partition: Partition = WHOLE,
    kernels: KernelSet = TORCH_FORMS,
) -> GatedDeltaNet:
    """Build a delta net from tensors below `prefix`, with the names of Qwen3.5 (`checkpoints.tensor_shapes`)."""
    inputs = [tensors[f"{prefix}in_proj_{name}.weight"] for name in ("qkv", "z", "b", "a")]
    log_rate, time_bias = tensors[f"{prefix}A_log"], tensors[f"{prefix}dt_bias"]
    assert log_rate.dtype == time_bias.dtype == torch.float32
    weights = DeltaNetWeights(
        sizes=sizes,
        conv_weight=tensors[f"{prefix}conv1d.weight"].squeeze(1).float(),
        rate=log_rate.exp(),
        time_bias=time_bias,
        norm_weight=tensors[f"{prefix}norm.weight"],
        eps=eps,
    )
    steps: DeltaSteps = kernels.get(Op.DELTA_STEPS, TorchDeltaSteps)(weights)
    return GatedDeltaNet(fused_linear(inputs), partition.output(tensors[f"{prefix}out_proj.weight"]), sizes, steps)


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """Replaces the attention of a layer. It reads no positions: the state carries the order of the rows.

    Attributes:
        qkv: one product for queries, keys and values (conv_size), the gate (value_size), and strength and time step
            (num_value_heads each); it may include the layer's first norm.
        o: the output product.
        steps: those between the two products, for caches of the same kernels.
    """

    qkv: RowsPart
    o: Linear
    sizes: DeltaNetSizes
    steps: DeltaSteps

    def __call__(self, rows: torch.Tensor, at: Pass) -> torch.Tensor:
        """Give all rows to the cache, and return the input of `o` for the kept rows; there must be at least one."""
        return self.attended(self.qkv(rows), at)

    def attended(self, projected: torch.Tensor, at: Pass) -> torch.Tensor:
        """Compute everything between the products: from the output of `qkv` to the input of `o`."""
        outputs, gate = self._run(projected, at)
        return self.steps.gated(at.kept.residual(outputs), at.kept.residual(gate)).flatten(1)

    def write(self, rows: torch.Tensor, at: Pass) -> None:
        """Only give all rows to the cache, for a layer whose output is not read."""
        self.write_projected(self.qkv(rows), at)

    def write_projected(self, projected: torch.Tensor, at: Pass) -> None:
        """Only give all rows to the cache, from the output of `qkv`."""
        self._run(projected, at)

    def _run(self, projected: torch.Tensor, at: Pass) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs of the rule in float32, and the gate, both [rows, num_value_heads, value_head_dim]."""
        sizes = self.sizes
        gate = projected[:, sizes.conv_size : sizes.conv_size + sizes.value_size]
        outputs = in_even_batches(
            lambda batch: self._scan(projected[batch.rows], at.cache, batch.metadata), at.metadata
        )
        return outputs, gate.unflatten(-1, (sizes.num_value_heads, sizes.value_head_dim))

    def _scan(self, projected: torch.Tensor, cache: DeltaCache[Any], metadata: AttentionMetadata) -> torch.Tensor:
        """Give the rows of an even batch to the cache; return the outputs [rows, num_value_heads, value_head_dim]."""
        slots = metadata.recurrent
        assert slots is not None, "the metadata of layers with a state names the slots of its rows"
        inputs = self.steps.inputs(projected.unflatten(0, (-1, metadata.num_queries)), cache.windows, slots)
        outputs = cache.prompt(inputs, slots) if slots.is_prompt else cache.verify(inputs, slots)
        return outputs.flatten(0, 1)
