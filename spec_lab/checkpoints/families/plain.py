"""Reads config.json of Llama, Qwen2, Qwen3 and MiMo. A model's layers are alike, but some of Qwen's can have windows.

Two spellings are read: that of the files on the hub (`rope_theta`, `rope_scaling`), and that of transformers 5
(`rope_parameters`, `dtype`). A key that the file leaves out has the default of transformers, except sizes that every
file has, such as `hidden_size`: without them the file is refused. An option that would change the forward pass is
refused if the forward code here lacks it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from spec_lab.checkpoints.config import MAX_LAYERS, ModelConfig
from spec_lab.checkpoints.families.rope import num_positions, read_rope
from spec_lab.checkpoints.json_input import ConfigFields, shown
from spec_lab.checkpoints.plan import LayerPlan, RopeConfig
from spec_lab.checkpoints.quantization import read_block
from spec_lab.core.errors import UserError

Family = Literal["llama", "qwen2", "qwen3"]


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
    refuse_unsupported(fields)
    qwen = family != "llama"
    vocab_size = fields.integer("vocab_size")
    max_positions = fields.integer("max_position_embeddings", 32768 if qwen else 2048)
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    plan = _plan(fields, family, max_positions)
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        rms_norm_eps=fields.epsilon("rms_norm_eps", 1e-6),
        max_position_embeddings=num_positions(plan.rope, max_positions),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        layers=tuple(replace(plan, window=window) for window in _layer_windows(fields, num_layers, family)),
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
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
    if num_heads % num_kv_heads:
        raise UserError(
            f"{source}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    if head_dim % 2:
        raise UserError(f"{source}: head_dim {head_dim} is odd; the rotary embedding needs an even one")
    attention_bias = family != "qwen2" and fields.flag("attention_bias")
    return LayerPlan(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=_whole_rope(fields, max_positions),
        intermediate_size=fields.integer("intermediate_size"),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=family == "llama" and fields.flag("mlp_bias"),
        qk_norm=family == "qwen3",
    )


def refuse_unsupported(fields: ConfigFields) -> None:
    """Refuse an activation other than SiLU, and weights quantized in a way that is not read."""
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise UserError(f"{fields.source}: hidden_act {shown(activation)} is not supported; supported is 'silu'")
    read_block(fields.values, fields.source)


def _whole_rope(fields: ConfigFields, max_positions: int) -> RopeConfig:
    """Read a rotary embedding that rotates all channels of a head."""
    rope = read_rope(fields, max_positions)
    if rope.partial_rotary_factor != 1.0:
        raise UserError(
            f"{fields.source}: partial_rotary_factor {rope.partial_rotary_factor} is not supported; supported is 1.0"
        )
    return rope


def _layer_windows(fields: ConfigFields, num_layers: int, family: Family) -> tuple[int | None, ...]:
    """Return each layer's sliding window. With `use_sliding_window`, Qwen's are in the layers that `layer_types` names,
    else from layer `max_window_layers` on. Llama has none."""
    config, source = fields.values, fields.source
    sliding = family != "llama" and fields.flag("use_sliding_window") and config.get("sliding_window", 4096) is not None
    window = fields.integer("sliding_window", 4096) if sliding else None
    layer_types = fields.texts("layer_types")
    first = fields.integer("max_window_layers", 28, least=0)
    by_depth = tuple(window if layer >= first else None for layer in range(num_layers))
    if not fields.has("layer_types"):
        if window is not None and "max_window_layers" in config and not fields.has("max_window_layers"):
            raise UserError(f"{source}: max_window_layers is null, but use_sliding_window is on; name the first layer")
        return by_depth
    if len(layer_types) != num_layers:
        raise UserError(f"{source}: layer_types names {len(layer_types)} layers, but num_hidden_layers is {num_layers}")
    for layer_type in layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise UserError(
                f"{source}: layer type {shown(layer_type)} is not supported; supported are full_attention, "
                "sliding_attention"
            )
    if window is None and "sliding_attention" in layer_types:
        raise UserError(
            f"{source}: layer_types has sliding_attention, but use_sliding_window or sliding_window is unset"
        )
    if "sliding_attention" not in layer_types and any(by_depth):
        raise UserError(
            f"{source}: use_sliding_window and max_window_layers {first} give layers a window, but layer_types gives "
            "none; remove the one that the model was not trained with"
        )
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)
