"""Reads config.json of Qwen3.5 and Qwen3-Next. By default three of four layers have a gated delta net, one has full
attention.

In a checkpoint with a vision tower, the text model's keys are in `text_config`. A key that the file leaves out has the
default of transformers, except sizes that every file has, such as `hidden_size`: without them the file is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from spec_lab.checkpoints.checks import refuse_values
from spec_lab.checkpoints.config import ModelConfig, text_part
from spec_lab.checkpoints.delta_sizes import DeltaNetSizes
from spec_lab.checkpoints.expert_sizes import ExpertSizes
from spec_lab.checkpoints.families.experts import read_softmax_experts, with_defaults
from spec_lab.checkpoints.families.plain import FULL, SILU, layer_types
from spec_lab.checkpoints.families.rope import num_positions, read_rope
from spec_lab.checkpoints.json_input import ConfigFields
from spec_lab.checkpoints.plan import LayerPlan

LINEAR = "linear_attention"
SILU_GATES = ("swish", "silu")
QWEN3_5_MOE: Mapping[str, Any] = {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "intermediate_size": 512,  # no layer has a dense MLP
}
QWEN3_NEXT: Mapping[str, Any] = {
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "intermediate_size": 5632,
}
"""The defaults of transformers, for keys that a file leaves out."""


def read_qwen3_5(config: dict[str, Any], source: str) -> ModelConfig:
    """Read a dense Qwen3.5, with or without a vision tower."""
    return _read(config, source, {}, _no_layer)


def read_qwen3_5_moe(config: dict[str, Any], source: str) -> ModelConfig:
    """Read a Qwen3.5 mixture, where every layer has experts."""
    return _read(config, source, QWEN3_5_MOE, _every_layer)


def read_qwen3_next(config: dict[str, Any], source: str) -> ModelConfig:
    """Read a Qwen3-Next, where a layer has experts unless the file makes it dense."""
    return _read(config, source, QWEN3_NEXT, _layers_not_dense)


def _no_layer(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    return (False,) * num_layers


def _every_layer(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    return (True,) * num_layers


def _layers_not_dense(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    step, dense = fields.integer("decoder_sparse_step", 1), set(fields.integers("mlp_only_layers") or ())
    if fields.integer("num_experts") == 0:
        return _no_layer(fields, num_layers)
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(num_layers))


HasExperts = Callable[[ConfigFields, int], tuple[bool, ...]]
"""Returns for each of `num_layers` layers whether it has experts."""


def _read(config: dict[str, Any], source: str, defaults: Mapping[str, Any], has_experts: HasExperts) -> ModelConfig:
    whole = ConfigFields(config, source)
    fields = with_defaults(text_part(config, source), defaults, source)
    gates = {"attn_output_gate": (True,), "output_gate_type": SILU_GATES}
    refuse_values(source, fields.values, {**SILU, **gates})
    vocab_size = fields.integer("vocab_size")
    max_positions = fields.integer("max_position_embeddings", 32768)
    layers = _layers(fields, max_positions, has_experts)
    return ModelConfig(
        family="hybrid",
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=num_positions(layers[0].rope, max_positions),
        tie_word_embeddings=whole.flag("tie_word_embeddings", fields.flag("tie_word_embeddings")),
        layers=layers,
        eos_token_ids=fields.token_ids("eos_token_id") or whole.token_ids("eos_token_id"),
        bos_token_id=fields.optional_integer("bos_token_id"),
    )


def _layers(fields: ConfigFields, max_positions: int, has_experts: HasExperts) -> tuple[LayerPlan, ...]:
    types = _layer_types(fields)
    sparse = has_experts(fields, len(types))
    experts = _experts(fields) if any(sparse) else None
    full = _full_layer(fields, max_positions)
    by_type = {FULL: full, LINEAR: replace(full, delta_net=_delta_net(fields))}
    return tuple(
        replace(by_type[layer_type], experts=experts if is_sparse else None)
        for layer_type, is_sparse in zip(types, sparse, strict=True)
    )


def _experts(fields: ConfigFields) -> ExpertSizes:
    """Read the routed experts and the shared one, whose output a gate scales for each row."""
    shared = fields.integer("shared_expert_intermediate_size")
    routed = read_softmax_experts(fields)
    return replace(routed, shared_intermediate_size=shared, shared_name="shared_expert", shared_gate=True)


def _layer_types(fields: ConfigFields) -> tuple[str, ...]:
    """Read the type of each layer. If the file names no types, the last of each `full_attention_interval` layers has
    full attention. The default is 4."""
    num_layers = fields.integer("num_hidden_layers")
    interval = fields.integer("full_attention_interval", 4)
    by_interval = tuple(LINEAR if (index + 1) % interval else FULL for index in range(num_layers))
    if not fields.has("layer_types"):
        return by_interval
    return layer_types(fields, (FULL, LINEAR))


def _full_layer(fields: ConfigFields, max_positions: int) -> LayerPlan:
    num_heads, num_kv_heads = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    head_dim = fields.integer("head_dim", 256)
    rope = read_rope(fields, max_positions, default_part=0.25)
    bias = fields.flag("attention_bias")
    return LayerPlan(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=rope,
        intermediate_size=fields.integer("intermediate_size"),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        attention_gate=True,
        float32_norms=True,
    )


def _delta_net(fields: ConfigFields) -> DeltaNetSizes:
    num_keys, num_values = fields.integer("linear_num_key_heads", 16), fields.integer("linear_num_value_heads", 32)
    return DeltaNetSizes(
        num_key_heads=num_keys,
        num_value_heads=num_values,
        key_head_dim=fields.integer("linear_key_head_dim", 128),
        value_head_dim=fields.integer("linear_value_head_dim", 128),
        kernel_size=fields.integer("linear_conv_kernel_dim", 4),
    )
