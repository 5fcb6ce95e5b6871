"""Reads config.json of Gemma 4 targets.

Sliding and full layers have different head sizes. In E2B and E4B the last layers read the KV of earlier ones, and each
layer has an embedding of its own. In 26B-A4B experts are added to the dense MLP.

Both spellings of the layers' sizes are read (`gemma4_text`). The decoder's keys may be at the top level or in
`text_config`. A key that the file leaves out has the default of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_lab.checkpoints.checks import refuse_values
from spec_lab.checkpoints.config import Gemma4Sizes, ModelConfig, text_part
from spec_lab.checkpoints.expert_sizes import ExpertSizes, RouterScores
from spec_lab.checkpoints.families.plain import layer_types
from spec_lab.checkpoints.gemma4_text import FULL, SLIDING, head_sizes, layer_rope
from spec_lab.checkpoints.json_input import ConfigFields
from spec_lab.checkpoints.plan import LayerPlan

FAMILY = "gemma4"
FULL_EVERY = 6
# The only values that the forward code here supports.
PLAIN_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "use_bidirectional_attention": ("vision",),
}


def read_gemma4(config: dict[str, Any], source: str) -> ModelConfig:
    """Read a text model, or the text part of a multimodal one."""
    outer = ConfigFields(config, source)
    text = ConfigFields(text_part(config, source), f"{source} (text_config)" if outer.has("text_config") else source)
    refuse_values(text.source, text.values, PLAIN_OPTIONS)
    vocab_size, hidden_size = text.integer("vocab_size", 262_144), text.integer("hidden_size", 2304)
    sizes = Gemma4Sizes(
        embedding_scale=hidden_size**0.5,
        logit_softcap=text.number("final_logit_softcapping") if text.has("final_logit_softcapping") else None,
        per_layer_width=_per_layer_width(text),
        keys_are_values=text.flag("attention_k_eq_v"),
    )
    ends = text if text.has("eos_token_id") else outer
    return ModelConfig(
        family=FAMILY,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        rms_norm_eps=text.number("rms_norm_eps", 1e-6),
        max_position_embeddings=text.integer("max_position_embeddings", 131_072),
        tie_word_embeddings=text.flag("tie_word_embeddings", outer.flag("tie_word_embeddings", True)),
        layers=_layers(text),
        eos_token_ids=ends.token_ids("eos_token_id"),
        bos_token_id=text.optional_integer("bos_token_id") if "bos_token_id" in text.values else 2,
        gemma4=sizes,
    )


def _per_layer_width(text: ConfigFields) -> int:
    """Return the width of the per-layer embeddings. A missing key means the default width, and null means none."""
    key = "hidden_size_per_layer_input"
    return 0 if key in text.values and not text.has(key) else text.integer(key, 256)


def _layers(text: ConfigFields) -> tuple[LayerPlan, ...]:
    """Return the plan of each layer. Each of the last `num_kv_shared_layers` layers reads the KV of the last earlier
    layer of its type that writes its own."""
    types = _layer_types(text)
    num_shared = text.integer("num_kv_shared_layers", 0)
    first_shared = len(types) - num_shared
    owners = {layer_type: index for index, layer_type in enumerate(types[: max(first_shared, 0)])}
    ropes = {layer_type: layer_rope(text, layer_type).config for layer_type in set(types)}
    experts = _experts(text) if text.flag("enable_moe_block") else None
    doubles = text.flag("use_double_wide_mlp")
    inner = text.integer("intermediate_size", 9216)
    plans: list[LayerPlan] = []
    for index, layer_type in enumerate(types):
        is_shared = index >= first_shared
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
        plans.append(plan)
    return tuple(plans)


def _layer_types(text: ConfigFields) -> list[str]:
    """Return the type of each layer. By default every sixth layer is full; the last one is always full."""
    num_layers = text.integer("num_hidden_layers", 30)
    types = list(layer_types(text, (FULL, SLIDING)))
    if not types:
        types = [SLIDING if (index + 1) % FULL_EVERY else FULL for index in range(num_layers)]
    return [*types[:-1], FULL]


def _experts(text: ConfigFields) -> ExpertSizes:
    return ExpertSizes(
        num_experts=text.integer("num_experts"),
        num_chosen=text.integer("top_k_experts"),
        intermediate_size=text.integer("moe_intermediate_size"),
        scores=RouterScores.SOFTMAX,
    )
