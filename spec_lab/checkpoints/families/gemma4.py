"""Reads config.json of Gemma 4 targets.

Sliding and full layers have different head sizes. In E2B and E4B the last layers read the KV of earlier ones, and each
layer has an embedding of its own. In 26B-A4B experts are added to the dense MLP.

Both spellings of the layers' sizes are read (`gemma4_text`). The decoder's keys may be at the top level or in
`text_config`. A key that the file leaves out has the default of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_lab.checkpoints.config import MAX_LAYERS, Gemma4Sizes, ModelConfig, text_part
from spec_lab.checkpoints.expert_sizes import ExpertSizes, RouterScores
from spec_lab.checkpoints.gemma4_text import FULL, SLIDING, head_sizes, layer_rope
from spec_lab.checkpoints.json_input import ConfigFields, shown
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.core.errors import UserError

KNOB = "target.path"
FAMILY = "gemma4"
FULL_EVERY = 6
# The only values that the forward code here supports; an absent key has the first of them.
PLAIN_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "use_bidirectional_attention": (None, "vision"),
}


def read_gemma4(config: dict[str, Any], source: str) -> ModelConfig:
    """Read a text model, or the text part of a multimodal one."""
    outer = ConfigFields(config, source)
    text = ConfigFields(text_part(config, source), f"{source} (text_config)" if outer.has("text_config") else source)
    _refuse_unsupported(outer, text)
    vocab_size, hidden_size = text.integer("vocab_size", 262_144), text.integer("hidden_size", 2304)
    sizes = Gemma4Sizes(
        embedding_scale=hidden_size**0.5,
        logit_softcap=text.number("final_logit_softcapping") if text.has("final_logit_softcapping") else None,
        per_layer_width=_per_layer_width(text, vocab_size),
        keys_are_values=text.flag("attention_k_eq_v"),
    )
    ends = text if text.has("eos_token_id") else outer
    return ModelConfig(
        family=FAMILY,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        rms_norm_eps=text.epsilon("rms_norm_eps", 1e-6),
        max_position_embeddings=text.integer("max_position_embeddings", 131_072),
        tie_word_embeddings=text.flag("tie_word_embeddings", outer.flag("tie_word_embeddings", True)),
        layers=_layers(text),
        eos_token_ids=ends.token_ids("eos_token_id", vocab_size),
        bos_token_id=text.optional_integer("bos_token_id") if "bos_token_id" in text.values else 2,
        gemma4=sizes,
    )


def _refuse_unsupported(outer: ConfigFields, text: ConfigFields) -> None:
    if outer.values.get("quantization_config") or text.values.get("quantization_config"):
        raise UserError(
            f"{outer.source}: quantized checkpoints are not supported; use the float16, bfloat16 or float32 one"
        )
    for key, allowed in PLAIN_OPTIONS.items():
        if text.values.get(key, allowed[0]) not in allowed:
            supported = " or ".join("null" if value is None else shown(value) for value in allowed)
            raise UserError(
                f"{text.source}: {key} {shown(text.values[key])} is not supported; supported is {supported}"
            )


def _per_layer_width(text: ConfigFields, vocab_size: int) -> int:
    """Return the width of the per-layer embeddings. A missing key means the default width, and null means none."""
    key = "hidden_size_per_layer_input"
    width = 0 if key in text.values and not text.has(key) else text.integer(key, 256, least=0)
    table_size = text.integer("vocab_size_per_layer_input", 262_144, least=0)
    if width and table_size != vocab_size:
        raise UserError(
            f"{text.source}: vocab_size_per_layer_input {table_size} differs from vocab_size {vocab_size}, which is "
            "not supported; fetch the file again"
        )
    return width


def _layers(text: ConfigFields) -> tuple[LayerPlan, ...]:
    """Return the plan of each layer. Each of the last `num_kv_shared_layers` layers reads the KV of the last earlier
    layer of its type that writes its own."""
    layer_types = _layer_types(text)
    num_shared = text.integer("num_kv_shared_layers", 0, least=0)
    first_shared = len(layer_types) - num_shared
    owners = {layer_type: index for index, layer_type in enumerate(layer_types[: max(first_shared, 0)])}
    ropes = {layer_type: layer_rope(text, layer_type, KNOB).config for layer_type in set(layer_types)}
    experts = _experts(text) if text.flag("enable_moe_block") else None
    doubles = text.flag("use_double_wide_mlp")
    inner = text.integer("intermediate_size", 9216)
    plans: list[LayerPlan] = []
    for index, layer_type in enumerate(layer_types):
        is_shared = index >= first_shared
        if is_shared and layer_type not in owners:
            raise UserError(
                f"{text.source}: layer {index} would read the KV of an earlier {layer_type} layer, but with "
                f"num_kv_shared_layers {num_shared} none writes its own; fetch the file again"
            )
        head_dim, num_kv_heads = head_sizes(text, index, layer_type)
        plan = LayerPlan(
            num_heads=text.integer("num_attention_heads", 8),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope=ropes[layer_type],
            intermediate_size=2 * inner if doubles and is_shared else inner,
            window=text.integer("sliding_window", 512) if layer_type == SLIDING else None,
            qk_norm=True,
            kv_owner=owners[layer_type] if is_shared else None,
            experts=experts,
        )
        _check_heads(text, index, plan, plans)
        plans.append(plan)
    return tuple(plans)


def _layer_types(text: ConfigFields) -> list[str]:
    """Return the type of each layer. By default every sixth layer is full; the last one is always full."""
    num_layers = text.integer("num_hidden_layers", 30, most=MAX_LAYERS)
    layer_types = list(text.texts("layer_types"))
    if not text.has("layer_types"):
        layer_types = [SLIDING if (index + 1) % FULL_EVERY else FULL for index in range(num_layers)]
    if len(layer_types) != num_layers:
        raise UserError(
            f"{text.source}: layer_types names {len(layer_types)} layers, but num_hidden_layers is {num_layers}"
        )
    unknown = [layer_type for layer_type in layer_types if layer_type not in (FULL, SLIDING)]
    if unknown:
        raise UserError(
            f"{text.source}: layer type {shown(unknown[0])} is not supported; supported are {FULL}, {SLIDING}"
        )
    return [*layer_types[:-1], FULL]


def _experts(text: ConfigFields) -> ExpertSizes:
    sizes = ExpertSizes(
        num_experts=text.integer("num_experts"),
        num_chosen=text.integer("top_k_experts"),
        intermediate_size=text.integer("moe_intermediate_size"),
        scores=RouterScores.SOFTMAX,
    )
    if sizes.num_chosen > sizes.num_experts:
        raise UserError(
            f"{text.source}: top_k_experts {sizes.num_chosen} is more than num_experts {sizes.num_experts}; fetch the "
            "file again"
        )
    return sizes


def _check_heads(text: ConfigFields, index: int, plan: LayerPlan, before: list[LayerPlan]) -> None:
    source = text.source
    if plan.num_heads % plan.num_kv_heads:
        raise UserError(
            f"{source}: num_attention_heads {plan.num_heads} is not a multiple of the {plan.num_kv_heads} key-value "
            f"heads of layer {index}"
        )
    if plan.head_dim % 2:
        raise UserError(
            f"{source}: head_dim {plan.head_dim} of layer {index} is odd; the rotary embedding needs an even one"
        )
    owner = plan if plan.kv_owner is None else before[plan.kv_owner]
    if (owner.num_kv_heads, owner.head_dim) != (plan.num_kv_heads, plan.head_dim):
        raise UserError(
            f"{source}: layer {index} reads the KV of layer {plan.kv_owner}, whose heads have another number or size; "
            "fetch the file again"
        )
