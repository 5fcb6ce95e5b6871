"""The names and shapes of a decoder's tensors, as Hugging Face checkpoints have them."""

from __future__ import annotations

from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.delta_net_checkpoint import delta_net_tensor_shapes
from spec_lab.checkpoints.expert_sizes import expert_tensor_shapes
from spec_lab.checkpoints.gemma4_shapes import gemma4_layer_shapes
from spec_lab.checkpoints.latent_sizes import latent_tensor_shapes
from spec_lab.checkpoints.plan import LayerPlan


def decoder_tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a decoder's tensors as Hugging Face has them, without a tied `lm_head.weight`."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    sizes = config.gemma4
    if sizes is not None and sizes.per_layer_width:
        packed = config.num_layers * sizes.per_layer_width
        shapes |= {
            "model.embed_tokens_per_layer.weight": (config.vocab_size, packed),
            "model.per_layer_model_projection.weight": (packed, hidden),
            "model.per_layer_projection_norm.weight": (sizes.per_layer_width,),
        }
    for index, plan in enumerate(config.layers):
        if sizes is None:
            layer = layer_tensor_shapes(plan, hidden, attention_input_size=hidden)
        else:
            layer = gemma4_layer_shapes(plan, sizes, hidden)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def layer_tensor_shapes(plan: LayerPlan, hidden_size: int, attention_input_size: int) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of one layer's tensors, without prefix. An EAGLE-3 head's attention reads
    2 * hidden_size channels."""
    others = "post_feedforward_layernorm" if plan.norms_outputs else "input_layernorm"
    return {
        f"{others}.weight": (hidden_size,),
        "post_attention_layernorm.weight": (hidden_size,),
        **_mixer_shapes(plan, hidden_size, attention_input_size),
        **_mlp_shapes(plan, hidden_size),
    }


def _mixer_shapes(plan: LayerPlan, hidden_size: int, input_size: int) -> dict[str, tuple[int, ...]]:
    if plan.delta_net is None:
        return _attention_shapes(plan, hidden_size, input_size)
    assert input_size == hidden_size, "no draft head has a delta net"
    return {
        f"linear_attn.{name}": shape for name, shape in delta_net_tensor_shapes(plan.delta_net, hidden_size).items()
    }


def _attention_shapes(plan: LayerPlan, hidden_size: int, input_size: int) -> dict[str, tuple[int, ...]]:
    if plan.latent is not None:
        latent = latent_tensor_shapes(plan.latent, plan.num_heads, hidden_size, input_size)
        return {f"self_attn.{name}": shape for name, shape in latent.items()}
    query_size, kv_size = plan.num_heads * plan.head_dim, plan.num_kv_heads * plan.head_dim
    projections = {
        "q_proj": (2 * query_size if plan.attention_gate else query_size, input_size),
        "k_proj": (kv_size, input_size),
        "v_proj": (kv_size, input_size),
        "o_proj": (hidden_size, query_size),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in projections.items():
        shapes[f"self_attn.{name}.weight"] = shape
        if plan.o_bias if name == "o_proj" else plan.qkv_bias:
            shapes[f"self_attn.{name}.bias"] = shape[:1]
    if plan.sinks:
        shapes["self_attn.sinks"] = (plan.num_heads,)
    if plan.qk_norm:
        sizes = (query_size, kv_size) if plan.wide_qk_norm else (plan.head_dim, plan.head_dim)
        shapes |= {f"self_attn.{name}.weight": (size,) for name, size in zip(("q_norm", "k_norm"), sizes, strict=True)}
    return shapes


def _mlp_shapes(plan: LayerPlan, hidden_size: int) -> dict[str, tuple[int, ...]]:
    if plan.experts is not None:
        return {f"mlp.{name}": shape for name, shape in expert_tensor_shapes(plan.experts, hidden_size).items()}
    inner = plan.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        shape = (hidden_size, inner) if name == "down_proj" else (inner, hidden_size)
        shapes[f"mlp.{name}.weight"] = shape
        if plan.mlp_bias:
            shapes[f"mlp.{name}.bias"] = shape[:1]
    return shapes
