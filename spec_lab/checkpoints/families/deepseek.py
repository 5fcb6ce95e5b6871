"""Reads config.json of decoders with latent attention: DeepSeek-V3 and V3.2, Kimi-K2, GLM-4.7-Flash (`glm4_moe_lite`).

`head_dim` and `num_key_value_heads` in such files are ignored: the sizes of attention follow from `kv_lora_rank` and
related keys. Both spellings of the rotary embedding are read, as in `plain`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from spec_lab.checkpoints.checks import refuse_values
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families.experts import read_sigmoid_experts
from spec_lab.checkpoints.families.plain import SILU
from spec_lab.checkpoints.families.rope import read_rope, score_factor
from spec_lab.checkpoints.json_input import ConfigFields
from spec_lab.checkpoints.latent_sizes import LatentSizes
from spec_lab.checkpoints.plan import LayerPlan

DEEPSEEK_V3: Mapping[str, Any] = {
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "first_k_dense_replace": 3,
}
GLM4_MOE_LITE: Mapping[str, Any] = {
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "moe_intermediate_size": 1536,
    "num_experts_per_tok": 4,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
"""The values that transformers gives to keys which a file leaves out."""

LATENT_ARCHITECTURES = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Glm4MoeLiteForCausalLM",
)


def read_deepseek_v3(config: dict[str, Any], source: str) -> ModelConfig:
    """Read DeepSeek-V3, R1, V3.1, V3.2 or Kimi-K2. V3.2 runs up to the length at which its indexer would leave out
    keys."""
    family = "kimi_k2" if config.get("model_type") == "kimi_k2" else "deepseek_v3"
    return _read(config, source, family, DEEPSEEK_V3)


def read_glm4_moe_lite(config: dict[str, Any], source: str) -> ModelConfig:
    """Read GLM-4.7-Flash."""
    return _read(config, source, "glm4_moe_lite", GLM4_MOE_LITE)


def _read(config: Mapping[str, Any], source: str, family: str, defaults: Mapping[str, Any]) -> ModelConfig:
    fields = ConfigFields({**defaults, **config}, source)
    refuse_values(source, fields.values, {**SILU, "moe_layer_freq": (1,)})
    vocab_size = fields.integer("vocab_size")
    max_positions = fields.integer("max_position_embeddings")
    is_sparse = _is_sparse(fields, fields.integer("num_hidden_layers"))
    plan = read_latent_plan(fields, max_positions)
    experts = read_sigmoid_experts(fields) if any(is_sparse) else None
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        max_position_embeddings=max_positions,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        layers=tuple(replace(plan, experts=experts) if sparse else plan for sparse in is_sparse),
        eos_token_ids=fields.token_ids("eos_token_id"),
        bos_token_id=fields.optional_integer("bos_token_id") if "bos_token_id" in fields.values else 0,
        max_dense_positions=fields.integer("index_topk") if fields.has("index_topk") else None,
    )


def read_latent_plan(fields: ConfigFields, max_positions: int) -> LayerPlan:
    """Read the plan of a layer with latent attention and a dense MLP."""
    rope = read_rope(fields, max_positions)
    rotated = fields.integer("qk_rope_head_dim", 64)
    sizes = LatentSizes(
        q_lora_rank=fields.optional_integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank", 512),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=rotated,
        v_head_dim=fields.integer("v_head_dim"),
        interleaved=fields.flag("rope_interleave", True),
        bias=fields.flag("attention_bias"),
        mscale=score_factor(fields, rope),
    )
    return LayerPlan(
        num_heads=fields.integer("num_attention_heads"),
        num_kv_heads=1,
        head_dim=rotated,
        rope=rope,
        intermediate_size=fields.integer("intermediate_size"),
        latent=sizes,
    )


def _is_sparse(fields: ConfigFields, num_layers: int) -> list[bool]:
    """Return for each layer whether it has experts: by `mlp_layer_types`, else from `first_k_dense_replace` on."""
    types = fields.texts("mlp_layer_types")
    for kind in types:
        refuse_values(fields.source, {"mlp_layer_types": kind}, {"mlp_layer_types": ("dense", "sparse")})
    num_dense = fields.integer("first_k_dense_replace")
    return [kind == "sparse" for kind in types] or [layer >= num_dense for layer in range(num_layers)]
