"""The names and shapes of a Gemma 4 layer's tensors."""

from __future__ import annotations

from spec_lab.checkpoints.config import Gemma4Sizes
from spec_lab.checkpoints.expert_sizes import ExpertSizes, routed_tensor_shapes
from spec_lab.checkpoints.plan import LayerPlan

Shapes = dict[str, tuple[int, ...]]


def gemma4_layer_shapes(plan: LayerPlan, sizes: Gemma4Sizes, hidden: int) -> Shapes:
    """Return the names and shapes of one layer's tensors, without prefix."""
    inner, width = plan.intermediate_size, sizes.per_layer_width
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    shapes: Shapes = {f"{name}_layernorm.weight": (hidden,) for name in norms}
    shapes |= {f"self_attn.{name}": shape for name, shape in _attention_shapes(plan, sizes, hidden).items()}
    shapes |= {
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "layer_scalar": (1,),
    }
    if plan.experts is not None:
        shapes |= _expert_shapes(plan.experts, hidden)
    if width:
        shapes |= {
            "per_layer_input_gate.weight": (width, hidden),
            "per_layer_projection.weight": (hidden, width),
            "post_per_layer_input_norm.weight": (hidden,),
        }
    return shapes


def _expert_shapes(sizes: ExpertSizes, hidden: int) -> Shapes:
    norms = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
    return {
        **{f"{name}.weight": (hidden,) for name in norms},
        "router.proj.weight": (sizes.num_experts, hidden),
        "router.scale": (hidden,),
        "router.per_expert_scale": (sizes.num_experts,),
        **routed_tensor_shapes(sizes, hidden),
    }


def _attention_shapes(plan: LayerPlan, sizes: Gemma4Sizes, hidden: int) -> Shapes:
    query_size, kv_size = plan.num_heads * plan.head_dim, plan.num_kv_heads * plan.head_dim
    shapes: Shapes = {
        "q_proj.weight": (query_size, hidden),
        "q_norm.weight": (plan.head_dim,),
        "o_proj.weight": (hidden, query_size),
    }
    if plan.kv_owner is not None:
        return shapes
    shapes |= {"k_proj.weight": (kv_size, hidden), "k_norm.weight": (plan.head_dim,)}
    if not (sizes.keys_are_values and plan.window is None):
        shapes["v_proj.weight"] = (kv_size, hidden)
    return shapes
