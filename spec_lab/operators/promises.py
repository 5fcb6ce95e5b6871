"""The layers that each set of kernels supports, and its promises for them.

This module imports no torch, since it is needed before torch is loaded, to compose a run. So `VECTOR` repeats a
constant of `spec_kernels`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from spec_lab.checkpoints.plan import LayerPlan

VECTOR = 16
"""The width of C's vectors: `spec_kernels.native.packing.LANES`."""

NATIVE_ROWS: Mapping[str, float] = {"avx512": inf, "avx2": inf, "neon": inf, "other": 32}
"""The most rows of a round with which C is faster than torch, by the registers that it was compiled for
(docs/log/cpu.md). The figure for neon is not measured."""


def native_takes(plan: LayerPlan) -> bool:
    """Return whether C supports all of a layer: it must be plain, and its heads and MLP must be whole vectors."""
    return plan.is_plain and plan.head_dim % VECTOR == 0 and plan.intermediate_size % VECTOR == 0


def has_dense_mlp(plan: LayerPlan) -> bool:
    """Return whether a layer ends in an MLP of two products without biases."""
    return plan.experts is None and not plan.mlp_bias


def triton_rows_are_invariant(plan: LayerPlan) -> bool:
    """Return whether, with few rows in Triton, a row of such a layer does not depend on the other rows."""
    is_other = plan.latent is not None or plan.delta_net is not None or plan.float32_norms or plan.attention_gate
    is_other = is_other or plan.wide_qk_norm or plan.norms_outputs
    return has_dense_mlp(plan) and not is_other
