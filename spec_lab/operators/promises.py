"""What sets of kernels take and promise, of a layer by its plan. It is said without torch, for runs that are composed.

`VECTOR` is of `spec_kernels`, said again.
"""

from __future__ import annotations

from spec_lab.checkpoints.plan import LayerPlan

VECTOR = 16
"""So many numbers C takes at once: `spec_kernels.native.packing.LANES`."""


def native_takes(plan: LayerPlan) -> bool:
    """Tell whether C has all of a layer: a plain one, whose heads and MLP are whole vectors."""
    return plan.is_plain and plan.head_dim % VECTOR == 0 and plan.intermediate_size % VECTOR == 0


def has_dense_mlp(plan: LayerPlan) -> bool:
    """Tell whether a layer ends in an MLP of two products without biases."""
    return plan.experts is None and not plan.mlp_bias


def triton_rows_are_invariant(plan: LayerPlan) -> bool:
    """Tell whether in Triton a row of such a layer of a few does not depend on the others."""
    is_other = plan.latent is not None or plan.delta_net is not None or plan.float32_norms or plan.attention_gate
    return has_dense_mlp(plan) and not is_other
