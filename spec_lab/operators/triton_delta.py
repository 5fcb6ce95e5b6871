"""Gated delta nets with Triton kernels (`spec_kernels.delta_*`), which take few launches and work in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_kernels.delta_chunks import CHUNK, delta_chunks
from spec_kernels.delta_inputs import delta_inputs
from spec_kernels.delta_kept import keep_delta_rows
from spec_kernels.delta_rule import Rows, delta_replay, delta_rule
from spec_kernels.gated_norm import gated_norm
from spec_lab.checkpoints.plan import DeltaNetSizes
from spec_lab.core.recurrent_cache import ConvWindows, RecurrentRows
from spec_lab.models.delta_caches import OneStateSlots, StateEachRowSlots
from spec_lab.models.delta_steps import DeltaNetWeights


@dataclass(frozen=True, slots=True)
class MixedRows:
    """The inputs of the delta rule's kernels for some rows, in float32.

    Attributes:
        mixed: [batch, num_rows, conv_size] queries of length 1 / sqrt(key_head_dim), keys of unit length, and values.
        log_decay, strength: [batch, num_rows, num_value_heads].
        model_dtype: the dtype of the model, in which the rows were computed before.
    """

    sizes: DeltaNetSizes
    mixed: torch.Tensor
    log_decay: torch.Tensor
    strength: torch.Tensor
    model_dtype: torch.dtype

    def given(self, slots: RecurrentRows) -> Rows:
        """Return what the rule's kernels read of the rows."""
        return self.mixed, self.log_decay, self.strength, slots.slot_ids, slots.committed


@dataclass(frozen=True, slots=True)
class TritonDeltaSteps:
    """Computes the steps of a gated delta net around the delta rule in Triton."""

    weights: DeltaNetWeights

    def inputs(self, projected: torch.Tensor, windows: ConvWindows, slots: RecurrentRows) -> MixedRows:
        weights, sizes = self.weights, self.weights.sizes
        rows = delta_inputs(
            windows.inputs,
            projected,
            weights.conv_weight,
            weights.rate,
            weights.time_bias,
            slots.slot_ids,
            slots.committed,
            sizes.num_key_heads,
            sizes.key_head_dim,
            slots.is_prompt,
        )
        return MixedRows(sizes, *rows, projected.dtype)

    def gated(self, outputs: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gated_norm(outputs, gate, self.weights.norm_weight, self.weights.eps)


class TritonStateCheckpoints(StateEachRowSlots):
    """`StateCheckpoints` with kernels."""

    def prompt(self, rows: MixedRows, slots: RecurrentRows) -> torch.Tensor:
        return _run(self.states, rows, slots)

    def verify(self, rows: MixedRows, slots: RecurrentRows) -> torch.Tensor:
        return _run(self.states, rows, slots)


class TritonReplayedUpdates(OneStateSlots):
    """`ReplayedUpdates` with kernels."""

    def prompt(self, rows: MixedRows, slots: RecurrentRows) -> torch.Tensor:
        return _run(self.states.unsqueeze(1), rows, slots)

    def verify(self, rows: MixedRows, slots: RecurrentRows) -> torch.Tensor:
        kept, given = (self.keys, self.values, self.log_decay, self.strength), rows.given(slots)
        outputs = delta_replay(self.states, *given, *kept)
        keep_delta_rows(*kept, *given[:4])
        return outputs


def _run(states: torch.Tensor, rows: MixedRows, slots: RecurrentRows) -> torch.Tensor:
    """Run rows over `states` [num_slots + 1, N, ...]. Store the last state of a prompt there, or that after each row.

    A prompt of at least one chunk in 16 bits is run in chunks, as products in TF32, which rounds no more than 16 bits
    do. Other rows are run one by one, so that a short prompt of up to 16 rows has the same bits as in verify.
    """
    given, heads = rows.given(slots), rows.sizes.num_key_heads
    if slots.is_prompt and rows.mixed.shape[1] >= CHUNK and rows.model_dtype != torch.float32:
        return delta_chunks(states, *given, heads)
    return delta_rule(states, *given, heads, slots.is_prompt)
