"""Reads config.json of Llama, Qwen2, Qwen3 and MiMo. A model's layers are alike, but some of Qwen's can have windows.

Two spellings are read: that of the files on the hub (`rope_theta`, `rope_scaling`), and that of transformers 5
(`rope_parameters`, `dtype`). A key that the file leaves out has the default of transformers, except sizes that every
file has, such as `hidden_size`: without them the file is refused. An option that would change the forward pass is
refused if the forward code here lacks it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Literal

from spec_lab.checkpoints.checks import refuse_values
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families.rope import num_positions, read_rope
from spec_lab.checkpoints.json_input import ConfigFields
from spec_lab.checkpoints.plan import LayerPlan

Family = Literal["llama", "qwen2", "qwen3"]
FULL, SLIDING = "full_attention", "sliding_attention"
SILU: Mapping[str, Collection[Any]] = {"hidden_act": ("silu",)}


def read_llama(config: dict[str, Any], source: str) -> ModelConfig:
    """Read a LlamaForCausalLM."""
    return _read(ConfigFields(config, source), "llama")


def read_qwen2(config: dict[str, Any], source: str) -> ModelConfig:
    """Read a Qwen2ForCausalLM."""
    return _read(ConfigFields(config, source), "qwen2")


def read_qwen3(config: dict[str, Any], source: str) -> ModelConfig:
    """Read a Qwen3ForCausalLM."""
    return _read(ConfigFields(config, source), "qwen3")


def _read(fields: ConfigFields, family: Family) -> ModelConfig:
    refuse_values(fields.source, fields.values, SILU)
    qwen = family != "llama"
    vocab_size = fields.integer("vocab_size")
    max_positions = fields.integer("max_position_embeddings", 32768 if qwen else 2048)
    num_layers = fields.integer("num_hidden_layers")
    plan = _plan(fields, family, max_positions)
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=num_positions(plan.rope, max_positions),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        layers=tuple(replace(plan, window=window) for window in _layer_windows(fields, num_layers, family)),
        eos_token_ids=fields.token_ids("eos_token_id"),
        bos_token_id=fields.optional_integer("bos_token_id") if qwen or "bos_token_id" in fields.values else 1,
    )


def _plan(fields: ConfigFields, family: Family, max_positions: int) -> LayerPlan:
    """Read the part of the plan that all layers share."""
    source = fields.source
    num_heads = fields.integer("num_attention_heads")
    qwen = family != "llama"
    num_kv_heads = fields.integer(
        "num_key_value_heads", 32 if qwen and "num_key_value_heads" not in fields.values else num_heads
    )
    head_dim = fields.integer("head_dim", 128 if family == "qwen3" else fields.integer("hidden_size") // num_heads)
    rope = read_rope(fields, max_positions)
    part = "partial_rotary_factor"
    refuse_values(source, {part: rope.partial_rotary_factor}, {part: (1.0,)})
    attention_bias = family != "qwen2" and fields.flag("attention_bias")
    return LayerPlan(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=rope,
        intermediate_size=fields.integer("intermediate_size"),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=family == "llama" and fields.flag("mlp_bias"),
        qk_norm=family == "qwen3",
    )


def _layer_windows(fields: ConfigFields, num_layers: int, family: Family) -> tuple[int | None, ...]:
    """Return each layer's sliding window. With `use_sliding_window`, Qwen's are in the layers that `layer_types` names,
    else from layer `max_window_layers` on. Llama has none."""
    sliding = family != "llama" and fields.flag("use_sliding_window")
    sliding = sliding and fields.values.get("sliding_window", 4096) is not None
    window = fields.integer("sliding_window", 4096) if sliding else None
    if not fields.has("layer_types"):
        first = fields.integer("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    types = layer_types(fields, (FULL, SLIDING))
    if window is None and SLIDING in types:
        refuse_values(fields.source, {"use_sliding_window": False}, {"use_sliding_window": (True,)})
    return tuple(window if kind == SLIDING else None for kind in types)


def layer_types(fields: ConfigFields, supported: Collection[str]) -> tuple[str, ...]:
    """Read the type of each layer, empty if the file names none."""
    types = fields.texts("layer_types")
    for kind in types:
        refuse_values(fields.source, {"layer_types": kind}, {"layer_types": supported})
    return types
