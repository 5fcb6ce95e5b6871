"""The names and shapes of a decoder's tensors, as Hugging Face checkpoints have them; where several have the same layer
under other names, those of Llama and of Qwen3.5."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from spec_lab.checkpoints.config import Gemma4Sizes, ModelConfig
from spec_lab.checkpoints.plan import DeltaNetSizes, ExpertSizes, LatentSizes, LayerPlan

Shapes = dict[str, tuple[int, ...]]
GEMMA4_NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")
GEMMA4_EXPERT_NORMS = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")


def weights(shapes: Mapping[str, tuple[int, ...]], biased: Collection[str] = ()) -> Shapes:
    """Return the tensors of modules whose weights have these shapes, and of which those in `biased` have a bias."""
    tensors: Shapes = {}
    for name, shape in shapes.items():
        tensors[f"{name}.weight"] = shape
        if name in biased:
            tensors[f"{name}.bias"] = shape[:1]
    return tensors


def norms(size: int, *names: str) -> Shapes:
    """Return the weights of norms over `size` channels."""
    return weights(dict.fromkeys(names, (size,)))


def below(prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> Shapes:
    """Return the same tensors with names that begin with `prefix` and a dot."""
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def decoder_tensor_shapes(config: ModelConfig) -> Shapes:
    """Return the names and shapes of a decoder's tensors as Hugging Face has them, without a tied `lm_head.weight`."""
    hidden, table = config.hidden_size, (config.vocab_size, config.hidden_size)
    width = 0 if config.gemma4 is None else config.gemma4.per_layer_width
    shapes = weights({"model.embed_tokens": table})
    if width:
        packed = config.num_layers * width
        tables = {"embed_tokens_per_layer": (config.vocab_size, packed), "per_layer_model_projection": (packed, hidden)}
        shapes |= below("model", weights(tables) | norms(width, "per_layer_projection_norm"))
    for index, plan in enumerate(config.layers):
        shapes |= below(f"model.layers.{index}", layer_tensor_shapes(plan, hidden, gemma4=config.gemma4))
    shapes |= norms(hidden, "model.norm")
    return shapes if config.tie_word_embeddings else shapes | weights({"lm_head": table})


def layer_tensor_shapes(
    plan: LayerPlan, hidden: int, input_size: int | None = None, gemma4: Gemma4Sizes | None = None
) -> Shapes:
    """Return the names and shapes of one layer's tensors, without prefix. `input_size` is what attention reads: the
    hidden size, or twice that in an EAGLE-3 head."""
    first = "post_feedforward_layernorm" if plan.norms_outputs else "input_layernorm"
    names = (first, "post_attention_layernorm") if gemma4 is None else [f"{name}_layernorm" for name in GEMMA4_NORMS]
    shapes = norms(hidden, *names)
    if plan.delta_net is not None:
        assert input_size is None, "no draft head has a delta net"
        shapes |= below("linear_attn", delta_net_tensor_shapes(plan.delta_net, hidden))
    elif plan.latent is not None:
        shapes |= below("self_attn", _latent_shapes(plan.latent, plan.num_heads, hidden, input_size or hidden))
    else:
        shapes |= below("self_attn", _attention_shapes(plan, hidden, input_size or hidden, gemma4))
    if plan.experts is None or gemma4 is not None:
        inner = plan.intermediate_size
        mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        shapes |= below("mlp", weights(mlp, mlp if plan.mlp_bias else ()))
    else:
        shapes |= below("mlp", expert_tensor_shapes(plan.experts, hidden))
    return shapes if gemma4 is None else shapes | _gemma4_shapes(plan, gemma4.per_layer_width, hidden)


def _attention_shapes(plan: LayerPlan, hidden: int, input_size: int, gemma4: Gemma4Sizes | None) -> Shapes:
    queries, keys = plan.num_heads * plan.head_dim, plan.num_kv_heads * plan.head_dim
    products = {
        "q_proj": (2 * queries if plan.attention_gate else queries, input_size),
        "k_proj": (keys, input_size),
        "v_proj": (keys, input_size),
        "o_proj": (hidden, queries),
    }
    if gemma4 is not None:  # random weights are drawn in this order
        products |= {"k_proj": products.pop("k_proj"), "v_proj": products.pop("v_proj")}
    if plan.kv_owner is not None:
        del products["k_proj"], products["v_proj"]
    elif gemma4 is not None and gemma4.keys_are_values and plan.window is None:
        del products["v_proj"]
    biased = {"o_proj"} if plan.o_bias else set()
    shapes = weights(products, biased | ({"q_proj", "k_proj", "v_proj"} if plan.qkv_bias else set()))
    if plan.sinks:
        shapes["sinks"] = (plan.num_heads,)
    if plan.qk_norm:
        shapes |= norms(queries if plan.wide_qk_norm else plan.head_dim, "q_norm")
    if plan.qk_norm and plan.kv_owner is None:
        shapes |= norms(keys if plan.wide_qk_norm else plan.head_dim, "k_norm")
    return shapes


def _latent_shapes(sizes: LatentSizes, num_heads: int, hidden: int, input_size: int) -> Shapes:
    rank, width = sizes.q_lora_rank, num_heads * sizes.query_width
    shapes: Shapes = {"q_proj": (width, input_size)}
    if rank is not None:
        shapes = {"q_a_proj": (rank, input_size), "q_a_layernorm": (rank,), "q_b_proj": (width, rank)}
    shapes |= {
        "kv_a_proj_with_mqa": (sizes.row_width, input_size),
        "kv_a_layernorm": (sizes.kv_lora_rank,),
        "kv_b_proj": (num_heads * (sizes.qk_nope_head_dim + sizes.v_head_dim), sizes.kv_lora_rank),
        "o_proj": (hidden, num_heads * sizes.v_head_dim),
    }
    return weights(shapes, ("q_a_proj", "kv_a_proj_with_mqa", "o_proj") if sizes.bias else ())


def delta_net_tensor_shapes(sizes: DeltaNetSizes, hidden: int) -> Shapes:
    """Return the names and shapes of the tensors below `linear_attn.`, as in Qwen3.5."""
    heads, products = sizes.num_value_heads, zip(("qkv", "z", "b", "a"), sizes.projected_sizes, strict=True)
    return {
        **weights({f"in_proj_{name}": (rows, hidden) for name, rows in products}),
        "conv1d.weight": (sizes.conv_size, 1, sizes.kernel_size),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (sizes.value_head_dim,),
        "out_proj.weight": (hidden, sizes.value_size),
    }


def routed_tensor_shapes(sizes: ExpertSizes, hidden: int) -> Shapes:
    """Return the names and shapes of the routed experts' tensors, each with all experts."""
    count, inner = sizes.num_experts, sizes.intermediate_size
    return {"experts.gate_up_proj": (count, 2 * inner, hidden), "experts.down_proj": (count, hidden, inner)}


def expert_tensor_shapes(sizes: ExpertSizes, hidden: int) -> Shapes:
    """Return the names and shapes of the tensors that replace an MLP's: router, experts, shared expert."""
    shapes = weights({"gate": (sizes.num_experts, hidden)})
    if sizes.correction_bias:
        shapes["gate.e_score_correction_bias"] = (sizes.num_experts,)
    routed = routed_tensor_shapes(sizes, hidden)
    shapes |= routed
    if sizes.clamp is not None:
        shapes |= {"gate.bias": (sizes.num_experts,), **{f"{name}_bias": shape[:2] for name, shape in routed.items()}}
    if inner := sizes.shared_intermediate_size:
        shared = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        shapes |= below(sizes.shared_name, weights(shared))
    return shapes | (weights({f"{sizes.shared_name}_gate": (1, hidden)}) if sizes.shared_gate else {})


def _gemma4_shapes(plan: LayerPlan, width: int, hidden: int) -> Shapes:
    """Return what a layer of Gemma 4 has beside attention and MLP."""
    shapes: Shapes = {"layer_scalar": (1,)}
    if plan.experts is not None:
        count = plan.experts.num_experts
        shapes |= norms(hidden, *GEMMA4_EXPERT_NORMS) | weights({"router.proj": (count, hidden)})
        shapes |= {"router.scale": (hidden,), "router.per_expert_scale": (count,)}
        shapes |= routed_tensor_shapes(plan.experts, hidden)
    if width:
        shapes |= weights({"per_layer_input_gate": (width, hidden), "per_layer_projection": (hidden, width)})
        shapes |= norms(hidden, "post_per_layer_input_norm")
    return shapes
