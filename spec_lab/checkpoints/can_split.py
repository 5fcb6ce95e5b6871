"""Says which layers can be split over processes. It imports no torch, so it can be asked before anything starts."""

from __future__ import annotations

from spec_lab.checkpoints.plan import LayerPlan


def problem_of_split(plan: LayerPlan, size: int) -> str | None:
    """Return why a layer cannot be split into `size` parts, with the remedy; None if it can."""
    if plan.delta_net is not None:
        return _refused(size, "splits no layers that keep a state (gated delta net)")
    if plan.latent is not None:
        return _refused(size, "cannot split latent attention (MLA)")
    if plan.wide_qk_norm:
        return _refused(size, "cannot split norms over all heads")
    if plan.experts is not None:
        return _refused(size, "splits no layers of experts yet")
    divided = {
        "num_key_value_heads": plan.num_kv_heads,
        "num_attention_heads": plan.num_heads,
        "intermediate_size": plan.intermediate_size,
    }
    for name, value in divided.items():
        if value % size:
            smaller = next(n for n in range(size - 1, 0, -1) if not any(each % n for each in divided.values()))
            return (
                f"target.tensor_parallel={size} does not divide the target's {name}, {value}; use "
                f"target.tensor_parallel={smaller}, and as many processes"
            )
    return None


def _refused(size: int, why: str) -> str:
    return f"target.tensor_parallel={size} {why}; use target.tensor_parallel=1"
