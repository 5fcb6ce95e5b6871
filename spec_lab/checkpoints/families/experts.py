"""Reads config.json of decoders with experts and grouped-query attention: Qwen3-MoE, GLM-4.5 to 4.7.

Other families also use the readers of experts in this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from spec_lab.checkpoints.checks import refuse_values
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.expert_sizes import ExpertSizes, RouterScores
from spec_lab.checkpoints.families.plain import SILU
from spec_lab.checkpoints.families.rope import num_positions, read_rope
from spec_lab.checkpoints.json_input import ConfigFields
from spec_lab.checkpoints.plan import LayerPlan

QWEN3_MOE: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "norm_topk_prob": False,
}
GLM4_MOE: Mapping[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
"""The values that transformers gives to keys which a file leaves out."""


def read_qwen3_moe(config: dict[str, Any], source: str) -> ModelConfig:
    """Read a Qwen3-MoE such as Qwen3-30B-A3B: every layer has experts unless the file makes it dense."""
    fields = with_defaults(config, QWEN3_MOE, source)
    refuse_values(source, config, {"use_sliding_window": (False,)})
    plan = replace(_attention_plan(fields), o_bias=fields.flag("attention_bias"), qk_norm=True)
    experts = read_softmax_experts(fields)
    step = fields.integer("decoder_sparse_step", 1)
    dense = {*(fields.integers("mlp_only_layers") or ())}
    num_layers = fields.integer("num_hidden_layers")
    is_sparse = [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]
    layers = tuple(replace(plan, experts=experts if sparse else None) for sparse in is_sparse)
    return _model(fields, "qwen3_moe", layers)


def read_glm4_moe(config: dict[str, Any], source: str) -> ModelConfig:
    """Read GLM-4.5, 4.6 or 4.7, or Air. By default the first layer is dense, and half of a head's channels rotate."""
    fields = with_defaults(config, GLM4_MOE, source)
    plan = replace(_attention_plan(fields, rotary_part=0.5), qk_norm=fields.flag("use_qk_norm"))
    num_layers = fields.integer("num_hidden_layers")
    num_dense = min(fields.integer("first_k_dense_replace"), num_layers)
    sparse = replace(plan, experts=read_sigmoid_experts(fields))
    return _model(fields, "glm4_moe", (plan,) * num_dense + (sparse,) * (num_layers - num_dense))


def with_defaults(config: Mapping[str, Any], defaults: Mapping[str, Any], source: str) -> ConfigFields:
    """Return the keys of a file, with a family's default values for missing ones."""
    return ConfigFields({**defaults, **{key: value for key, value in config.items() if value is not None}}, source)


def read_softmax_experts(fields: ConfigFields) -> ExpertSizes:
    """Read the experts of a Qwen. transformers 5 writes `num_local_experts` instead of `num_experts`."""
    return ExpertSizes(
        num_experts=fields.integer("num_local_experts", fields.integer("num_experts")),
        num_chosen=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        scores=RouterScores.SOFTMAX,
        renormalized=fields.flag("norm_topk_prob"),
    )


def read_sigmoid_experts(fields: ConfigFields) -> ExpertSizes:
    """Read the experts of a DeepSeek-V3 or a GLM-4.5."""
    refuse_values(fields.source, fields.values, {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)})
    inner = fields.integer("moe_intermediate_size")
    return ExpertSizes(
        num_experts=fields.integer("num_local_experts", fields.integer("n_routed_experts")),
        num_chosen=fields.integer("num_experts_per_tok"),
        intermediate_size=inner,
        scores=RouterScores.SIGMOID,
        correction_bias=True,
        num_groups=fields.integer("n_group"),
        num_chosen_groups=fields.integer("topk_group"),
        renormalized=fields.flag("norm_topk_prob"),
        scaling=fields.number("routed_scaling_factor"),
        shared_intermediate_size=inner * fields.integer("n_shared_experts"),
    )


def _attention_plan(fields: ConfigFields, rotary_part: float = 1.0) -> LayerPlan:
    """Read the part of the plan that all layers share. `rotary_part` is the default fraction of a head's channels that
    are rotated."""
    refuse_values(fields.source, fields.values, SILU)
    num_heads, num_kv_heads = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    head_dim = fields.integer("head_dim", fields.integer("hidden_size") // num_heads)
    rope = read_rope(fields, fields.integer("max_position_embeddings"), rotary_part)
    return LayerPlan(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=rope,
        intermediate_size=fields.integer("intermediate_size"),
        qkv_bias=fields.flag("attention_bias"),
    )


def _model(fields: ConfigFields, family: str, layers: tuple[LayerPlan, ...]) -> ModelConfig:
    vocab_size = fields.integer("vocab_size")
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        max_position_embeddings=num_positions(layers[0].rope, fields.integer("max_position_embeddings")),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        layers=layers,
        eos_token_ids=fields.token_ids("eos_token_id"),
        bos_token_id=fields.optional_integer("bos_token_id"),
    )
