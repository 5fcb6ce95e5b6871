"""The families of targets: config.json through transformers' own config classes, and a table of what each family has.

transformers' classes know the spellings of every key and the values of those that a file leaves out. The table says
what a family has beyond a Llama, and which of transformers' options the forward code here supports. The first import of
a config class takes two seconds and 155 MB (5.23).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from spec_lab.checkpoints.config import Gemma4Sizes, ModelConfig, read_keys, text_part
from spec_lab.checkpoints.json_input import read_json, refuse_values
from spec_lab.checkpoints.plan import DeltaNetSizes, ExpertSizes, LatentSizes, LayerPlan, RopeConfig, RouterScores
from spec_lab.checkpoints.rope_config import num_positions, read_rope, score_factor

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
INDEXED = "indexed_attention", "deepseek_sparse_attention"  # new and old; full up to `max_dense_positions`
LATENT_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
DELTA_KEYS = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
SILU: Mapping[str, Collection[Any]] = {"hidden_act": ("silu",)}


@dataclass(frozen=True, slots=True)
class Family:
    """What a family has beyond a Llama.

    Attributes:
        plan: fields of `LayerPlan`: a value, or the config's key that has it.
        named: `ModelConfig.family`, where several model types have the same tensors and forward code; None for the
            model type.
        config: the model type whose config class of transformers reads it, where it has none of its own.
        only: the values that the forward code here supports, by key of config.json.
        router: the function of the router's logits, where layers have experts. A sigmoid has a bias of the choice.
        has_windows: whether every layer has the config's `sliding_window`, if it has one.
        factors: returns `ModelConfig.factors` for a config.
    """

    plan: Mapping[str, Any] = field(default_factory=dict)
    named: str | None = None
    config: str | None = None
    only: Mapping[str, Collection[Any]] = field(default_factory=lambda: SILU)
    router: RouterScores = RouterScores.SOFTMAX
    has_windows: bool = False
    factors: Callable[[Any], Mapping[str, float]] = lambda config: {}


BIASES = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
SIGMOID = Family(router=RouterScores.SIGMOID, only={**SILU, "scoring_func": ("sigmoid",)})
WIDE = {"qk_norm": True, "wide_qk_norm": True}
HYBRID = Family(
    {**BIASES, "qk_norm": True, "attention_gate": True, "float32_norms": True},
    named="hybrid",
    only={**SILU, "attn_output_gate": (True,), "output_gate_type": ("swish", "silu")},
)
FAMILIES: Mapping[str, Family] = {
    "llama": Family({**BIASES, "mlp_bias": "mlp_bias"}),
    "qwen2": Family({"qkv_bias": True}),
    "mistral": Family(has_windows=True),
    "ministral3": Family(has_windows=True),
    "mistral4": Family(),
    "mixtral": Family(has_windows=True),
    "phi3": Family(has_windows=True),
    "smollm3": Family({**BIASES, "mlp_bias": "mlp_bias"}),
    "olmo3": Family({**BIASES, **WIDE, "norms_outputs": True}),
    "granite": Family(
        {**BIASES, "mlp_bias": "mlp_bias"},
        factors=lambda config: {
            "embed_tokens": config.embedding_multiplier,
            "q_proj": config.attention_multiplier * (config.hidden_size / config.num_attention_heads) ** 0.5,
            "o_proj": config.residual_multiplier,
            "down_proj": config.residual_multiplier,
            "lm_head": 1 / config.logits_scaling,
        },
    ),
    "mimo": Family({"qkv_bias": True}, named="qwen2", config="qwen2"),
    "qwen3": Family({**BIASES, "qk_norm": True}),
    "qwen3_moe": Family({**BIASES, "qk_norm": True}, only={**SILU, "use_sliding_window": (False,)}),
    "glm4_moe": replace(SIGMOID, plan={"qk_norm": "use_qk_norm", "qkv_bias": "attention_bias"}),
    "minimax_m2": replace(SIGMOID, plan=WIDE),
    "deepseek_v3": SIGMOID,
    "deepseek_v32": replace(SIGMOID, named="deepseek_v3", config="deepseek_v3"),
    "kimi_k2": replace(SIGMOID, config="deepseek_v3"),
    "glm4_moe_lite": SIGMOID,
    "gpt_oss": Family({**BIASES, "sinks": True, "float32_norms": True}, only={**SILU, "swiglu_alpha": (1.702,)}),
    "qwen3_next": HYBRID,
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": HYBRID,
    "gemma4_text": Family(
        {"qk_norm": True},
        named="gemma4",
        only={
            "hidden_activation": ("gelu_pytorch_tanh",),
            "attention_bias": (False,),
            "use_bidirectional_attention": ("vision",),
        },
    ),
}
"""The families by the `model_type` of the part of config.json that is the decoder's."""


def read_model_config(folder: Path) -> ModelConfig:
    """Read the config of a folder or a GGUF file.

    A folder's end tokens are those that `generate` of transformers would use. If there is a generation_config.json, its
    end tokens are the only ones, even if it names none. Without that file, they are those of config.json; a family's
    default is not used.

    Raises:
        UserError: the errors of `read_decoder`.
    """
    keys, generation = read_keys(folder), folder / "generation_config.json"
    if generation.exists():
        keys["eos_token_id"] = read_json(generation).get("eos_token_id")
    return read_decoder(keys, str(folder))


def read_decoder(keys: Mapping[str, Any], source: str) -> ModelConfig:
    """Read the keys of a config.json; `source` names the file in errors. A multimodal model's decoder is in
    `text_config`.

    Raises:
        UserError: a family that is not in the table, or a value that its forward code does not support.
    """
    from transformers import CONFIG_MAPPING

    text = deepcopy(dict(text_part(keys)))
    kind = text.pop("model_type", None)
    refuse_values(source, {"model_type": str(kind)}, {"model_type": FAMILIES})
    family = FAMILIES[kind]
    refuse_values(source, text, family.only)
    config = CONFIG_MAPPING[family.config or kind].from_dict(text)

    usual = SLIDING if family.has_windows and config.sliding_window is not None else FULL
    types = get(config, "layer_types") or [usual] * config.num_hidden_layers
    layers = tuple(_layer(config, family, index, types, source) for index in range(len(types)))
    factors, rope = family.factors(config), config.rope_parameters
    # From there on queries are multiplied by a factor of their position (Llama 4, Ministral 3).
    first_scaled = rope["original_max_position_embeddings"] if rope.get("llama_4_scaling_beta") else None
    gemma4 = None
    if kind == "gemma4_text":
        width, cap = config.hidden_size_per_layer_input or 0, config.final_logit_softcapping
        gemma4 = Gemma4Sizes(config.hidden_size**0.5, cap, width, config.attention_k_eq_v)
    ends = keys.get("eos_token_id", text.get("eos_token_id"))
    return ModelConfig(
        family=family.named or kind,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=max(num_positions(plan.rope, config.max_position_embeddings) for plan in layers),
        tie_word_embeddings=not factors and bool(keys.get("tie_word_embeddings", config.tie_word_embeddings)),
        layers=layers,
        eos_token_ids=tuple(ends) if isinstance(ends, list | tuple) else () if ends is None else (ends,),
        bos_token_id=config.bos_token_id,
        gemma4=gemma4,
        max_dense_positions=get(config, "index_topk", first_scaled),
        factors=tuple(factors.items()),
    )


def get(config: Any, key: str, default: Any = None) -> Any:
    """Return the value of a config's key; the default if it is missing or null."""
    value = getattr(config, key, None)
    return default if value is None else value


def _layer(config: Any, family: Family, index: int, types: list[str], source: str) -> LayerPlan:
    """Return the plan of one layer. Each of the last `num_kv_shared_layers` layers reads the KV of the last earlier
    layer of its type that writes its own (Gemma 4)."""
    kind, first_shared = types[index], len(types) - get(config, "num_kv_shared_layers", 0)
    refuse_values(source, {"layer_types": kind}, {"layer_types": (FULL, SLIDING, LINEAR, *INDEXED)})
    window = config.sliding_window if kind == SLIDING else None
    if kind == SLIDING and window is None:
        refuse_values(source, {"use_sliding_window": False}, {"use_sliding_window": (True,)})
    own = config.per_layer_config[index] if get(config, "per_layer_config") else config  # sizes that differ by layer
    is_latent, num_heads = get(config, "kv_lora_rank") is not None, config.num_attention_heads
    head_dim = getattr(own, "head_dim", None) or config.hidden_size // num_heads
    inner = get(config, "intermediate_size", get(config, "moe_intermediate_size"))
    owners = [earlier for earlier in range(first_shared) if types[earlier] == kind] if index >= first_shared else []
    rope = read_rope(config.rope_parameters.get(kind, config.rope_parameters), config.max_position_embeddings)
    latent = None
    if is_latent:
        latent = LatentSizes(
            **{key: getattr(config, key) for key in LATENT_KEYS},
            interleaved=get(config, "rope_interleave", True),
            bias=config.attention_bias,
            mscale=score_factor(config.rope_parameters),
        )
        rope = replace(rope, partial_rotary_factor=1.0)  # of `head_dim`, which is the rotated part (Mistral 4)
    if not get(config, "no_rope_layers", [True] * len(types))[index]:
        rope = RopeConfig(rope.theta, "linear", factor=inf)  # turns by nothing (SmolLM3)
    return LayerPlan(
        num_heads=num_heads,
        num_kv_heads=1 if is_latent else own.num_key_value_heads,
        head_dim=config.qk_rope_head_dim if is_latent else head_dim,
        rope=rope,
        intermediate_size=2 * inner if index >= first_shared and get(config, "use_double_wide_mlp") else inner,
        window=window,
        kv_owner=max(owners, default=None),
        delta_net=DeltaNetSizes(*(getattr(config, f"linear_{key}") for key in DELTA_KEYS)) if kind == LINEAR else None,
        latent=latent,
        experts=_experts(config, family) if _is_sparse(config, index) else None,
        **{name: bool(get(config, value)) if isinstance(value, str) else value for name, value in family.plan.items()},
    )


def _is_sparse(config: Any, index: int) -> bool:
    """Return whether a layer has experts, by whichever keys the family has for it."""
    if not _num_experts(config) or not get(config, "enable_moe_block", True):
        return False
    if (kinds := get(config, "mlp_layer_types")) is not None:
        return bool(kinds[index] == "sparse")
    is_dense = index < get(config, "first_k_dense_replace", 0) or index in get(config, "mlp_only_layers", ())
    return not is_dense and (index + 1) % get(config, "decoder_sparse_step", 1) == 0


def _num_experts(config: Any) -> int:
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    return next((number for name in names if (number := get(config, name))), 0)


def _experts(config: Any, family: Family) -> ExpertSizes:
    inner = get(config, "moe_intermediate_size") or config.intermediate_size
    one_shared = get(config, "shared_expert_intermediate_size", 0)  # Qwen3-Next and Qwen3.5, with a gate
    return ExpertSizes(
        num_experts=_num_experts(config),
        num_chosen=get(config, "num_experts_per_tok") or config.top_k_experts,
        intermediate_size=inner,
        scores=family.router,
        correction_bias=family.router is RouterScores.SIGMOID,
        num_groups=get(config, "n_group", 1),
        num_chosen_groups=get(config, "topk_group", 1),
        renormalized=get(config, "norm_topk_prob", True),
        scaling=get(config, "routed_scaling_factor", 1.0),
        shared_intermediate_size=one_shared or inner * get(config, "n_shared_experts", 0),
        shared_name="shared_expert" if one_shared else "shared_experts",
        shared_gate=bool(one_shared),
        # transformers 5.17 has no such key of gpt-oss, and clamps at 7
        clamp=get(config, "swiglu_limit", 7.0 if config.model_type == "gpt_oss" else None),
    )
