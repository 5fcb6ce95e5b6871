"""The configs of Qwen3.5 and Qwen3-Next: three layers with a gated delta net to one with full, gated attention.

The text model's keys stand in `text_config` where the checkpoint also sees. A key the file leaves out has the value
transformers gives it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spec_lab.errors import UserError
from spec_lab.models.config import MAX_LAYERS, ModelConfig, text_part
from spec_lab.models.delta_sizes import DeltaNetSizes
from spec_lab.models.families.plain import declared_dtype, read_rope, refuse_unsupported
from spec_lab.models.json_input import ConfigFields, shown
from spec_lab.models.plan import LayerPlan

FULL, LINEAR = "full_attention", "linear_attention"
SILU_GATES = ("swish", "silu")


def read_hybrid(config: dict[str, Any], source: str) -> ModelConfig:
    """Read a Qwen3.5 or Qwen3-Next without experts."""
    whole = ConfigFields(config, source)
    fields = ConfigFields(text_part(config, source), source)
    for part in (whole, fields):
        refuse_unsupported(part)
    _refuse_other_gates(fields)
    _refuse_experts(fields)
    vocab_size = fields.integer("vocab_size")
    max_positions = fields.integer("max_position_embeddings", 32768)
    return ModelConfig(
        family="hybrid",
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_positions,
        tie_word_embeddings=whole.flag("tie_word_embeddings", fields.flag("tie_word_embeddings")),
        layers=_layers(fields, max_positions),
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size) or whole.token_ids("eos_token_id", vocab_size),
        bos_token_id=fields.optional_integer("bos_token_id"),
        torch_dtype=declared_dtype(fields if fields.has("dtype") or fields.has("torch_dtype") else whole),
    )


def _refuse_other_gates(fields: ConfigFields) -> None:
    """Refuse gates of attention or of the delta nets that no published model has, and the forward code neither."""
    if not fields.flag("attn_output_gate", True):
        raise UserError(f"{fields.source}: attn_output_gate false is not supported; supported is true")
    gate = fields.text("output_gate_type", SILU_GATES[0])
    if gate not in SILU_GATES:
        raise UserError(
            f"{fields.source}: output_gate_type {shown(gate)} is not supported; supported are {', '.join(SILU_GATES)}"
        )


def _refuse_experts(fields: ConfigFields) -> None:
    num_dense = len(set(fields.integers("mlp_only_layers") or ()))
    if fields.has("num_experts") and num_dense < fields.integer("num_hidden_layers", most=MAX_LAYERS):
        raise UserError(f"{fields.source}: layers with experts are not supported in this family; use a dense model")


def _layers(fields: ConfigFields, max_positions: int) -> tuple[LayerPlan, ...]:
    full = _full_layer(fields, max_positions)
    linear = replace(full, delta_net=_delta_net(fields))
    return tuple(full if kind == FULL else linear for kind in _layer_types(fields))


def _layer_types(fields: ConfigFields) -> tuple[str, ...]:
    """Read the kind of each layer; where the file names none, every fourth one is full."""
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    if not fields.has("layer_types"):
        interval = fields.integer("full_attention_interval", 4)
        return tuple(LINEAR if (index + 1) % interval else FULL for index in range(num_layers))
    layer_types = fields.texts("layer_types")
    if len(layer_types) != num_layers:
        raise UserError(
            f"{fields.source}: layer_types names {len(layer_types)} layers, num_hidden_layers is {num_layers}"
        )
    for layer_type in layer_types:
        if layer_type not in (FULL, LINEAR):
            raise UserError(
                f"{fields.source}: layer type {shown(layer_type)} is not supported; supported are {FULL}, {LINEAR}"
            )
    return layer_types


def _full_layer(fields: ConfigFields, max_positions: int) -> LayerPlan:
    num_heads, num_kv_heads = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    _require_multiple(fields, "num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
    head_dim = fields.integer("head_dim", 256)
    rope = read_rope(fields, max_positions, default_part=0.25)
    if int(head_dim * rope.partial_rotary_factor) % 2 or not 0 < rope.partial_rotary_factor <= 1:
        raise UserError(
            f"{fields.source}: partial_rotary_factor {rope.partial_rotary_factor} of head_dim {head_dim} is no even "
            "number of channels; take config.json from the checkpoint anew"
        )
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
    )


def _delta_net(fields: ConfigFields) -> DeltaNetSizes:
    num_keys, num_values = fields.integer("linear_num_key_heads", 16), fields.integer("linear_num_value_heads", 32)
    _require_multiple(fields, "linear_num_value_heads", num_values, "linear_num_key_heads", num_keys)
    return DeltaNetSizes(
        num_key_heads=num_keys,
        num_value_heads=num_values,
        key_head_dim=fields.integer("linear_key_head_dim", 128),
        value_head_dim=fields.integer("linear_value_head_dim", 128),
        kernel_size=fields.integer("linear_conv_kernel_dim", 4, least=2),
    )


def _require_multiple(fields: ConfigFields, name: str, number: int, of_name: str, of: int) -> None:
    if number % of:
        raise UserError(f"{fields.source}: {name} {number} is no multiple of {of_name} {of}")
