"""Sizes and options of a decoder, read from the config.json of a Hugging Face folder without transformers.

Both spellings are read: the one of the files on the hub (`rope_theta`, `rope_scaling`, `torch_dtype`) and the one that
transformers 5 writes (`rope_parameters`, `dtype`). A key the file leaves out has the value transformers gives it; an
option that would change the forward pass and that the lean code lacks is refused, never skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from spec_lab.errors import UserError
from spec_lab.models.json_input import ConfigFields, read_json, shown

Family = Literal["llama", "qwen2", "qwen3"]
RopeScaling = Literal["none", "linear", "llama3"]

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MiMoForCausalLM": "qwen2",
}
MTP_COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
# Past any model there is: a slip of the pen must not make us list the names of millions of tensors.
MAX_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of a model.

    Attributes:
        low_freq_factor: this and the next two matter for `llama3` only.
        partial_rotary_factor: part of a head's channels that turn, from the first on.
    """

    theta: float
    scaling: RopeScaling
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    partial_rotary_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The facts that the forward code needs to know of a decoder.

    Attributes:
        layer_windows: keys each layer's query sees, itself included; None is full attention. One entry a layer.
        eos_token_ids: every id that ends a request, empty when the checkpoint names none.
        attention_gate: q_proj has doubled rows, of each head the query's and then its output gate's (Qwen3-Next).
        torch_dtype: name of the dtype the config declares, "float32" when it declares none.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layer_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    torch_dtype: str
    attention_gate: bool = False

    @classmethod
    def from_dict(cls, config: dict[str, Any], source: str) -> ModelConfig:
        """Read the keys of a config.json; `source` names the file in errors.

        Raises:
            UserError: an unsupported architecture or option, or a missing or impossible value.
        """
        fields = ConfigFields(config, source)
        family = _family(fields)
        _refuse_unsupported(fields)
        qwen = family != "llama"
        num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
        vocab_size = fields.integer("vocab_size")
        num_heads = fields.integer("num_attention_heads")
        hidden_size = fields.integer("hidden_size")
        num_kv_heads = fields.integer(
            "num_key_value_heads", 32 if qwen and "num_key_value_heads" not in config else num_heads
        )
        max_positions = fields.integer("max_position_embeddings", 32768 if qwen else 2048)
        head_dim = fields.integer("head_dim", 128 if family == "qwen3" else hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise UserError(
                f"{source}: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
            )
        if head_dim % 2:
            raise UserError(f"{source}: head_dim {head_dim} is odd; the rotary embedding needs an even one")
        attention_bias = family != "qwen2" and fields.flag("attention_bias")
        return cls(
            family=family,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            max_position_embeddings=max_positions,
            rope=_rope(fields, max_positions),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            qkv_bias=attention_bias or family == "qwen2",
            o_bias=attention_bias,
            mlp_bias=family == "llama" and fields.flag("mlp_bias"),
            qk_norm=family == "qwen3",
            layer_windows=_layer_windows(fields, num_layers, family),
            eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
            bos_token_id=fields.optional_integer("bos_token_id") if qwen or "bos_token_id" in config else 1,
            torch_dtype=fields.text("dtype", fields.text("torch_dtype", "float32")).removeprefix("torch."),
        )


def read_model_config(folder: Path, knob: str = "target.path") -> ModelConfig:
    """Read config.json, and the end tokens as `generate` of transformers has them.

    Where there is a generation_config.json, its end tokens are the only ones, even if it names none. Without that file
    they are those that config.json spells out; a family's default is not used.

    Args:
        knob: the setting that led here, named in errors.

    Raises:
        UserError: no such folder or file, no JSON object, or what `ModelConfig.from_dict` refuses.
    """
    config = ModelConfig.from_dict(read_config_json(folder, knob), str(folder / "config.json"))
    generation = folder / "generation_config.json"
    if not generation.exists():
        return config
    fields = ConfigFields(read_json(generation), str(generation))
    return replace(config, eos_token_ids=fields.token_ids("eos_token_id", config.vocab_size))


def read_config_json(folder: Path, knob: str) -> dict[str, Any]:
    """The config.json of a checkpoint folder, as it stands in the file."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; {knob} must name one with config.json and model.safetensors")
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder}: has no config.json; {knob} must name a Hugging Face checkpoint folder")
    return read_json(path)


def text_part(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The decoder's keys: those of `text_config`, where a config.json has such a part, else its own."""
    return ConfigFields(config, source).object("text_config") or config


def num_mtp_modules(config: Mapping[str, Any], source: str = "config.json") -> int:
    """Counts the multi-token prediction modules that a config.json names; 0 when it names none."""
    fields = ConfigFields(text_part(config, source), source)
    named = (fields.integer(key, least=0, most=MAX_LAYERS) for key in MTP_COUNT_KEYS if fields.has(key))
    return next(named, 0)


def read_num_mtp_modules(folder: Path, knob: str) -> int:
    """`num_mtp_modules` of a checkpoint folder."""
    return num_mtp_modules(read_config_json(folder, knob), str(folder / "config.json"))


def _family(fields: ConfigFields) -> Family:
    architectures = fields.texts("architectures")
    for name in architectures:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    found = ", ".join(map(shown, architectures)) or "none named"
    raise UserError(f"{fields.source}: architecture {found} is not supported; supported are {', '.join(ARCHITECTURES)}")


def _refuse_unsupported(fields: ConfigFields) -> None:
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise UserError(f"{fields.source}: hidden_act {shown(activation)} is not supported; supported is 'silu'")
    if fields.values.get("quantization_config"):
        raise UserError(
            f"{fields.source}: quantized checkpoints are not supported; use the float16, bfloat16 or float32 one"
        )


def _rope(config: ConfigFields, max_positions: int) -> RopeConfig:
    source = config.source
    parameters = config.object("rope_scaling") or config.object("rope_parameters")
    if any(isinstance(value, dict) for value in parameters.values()):
        # transformers reads such parameters for no family here: Llama skips them, the Qwen families fail.
        raise UserError(f"{source}: rope parameters keyed by layer type are not supported; one set for all layers is")
    fields = ConfigFields(parameters, f"{source} (rope)")
    theta = fields.number("rope_theta", config.number("rope_theta", 10000.0))
    partial = fields.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UserError(f"{source}: partial_rotary_factor {partial} is not supported; supported is 1.0")
    kind = fields.text("rope_type", fields.text("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta, scaling="none")
    if kind == "linear":
        return RopeConfig(theta=theta, scaling="linear", factor=fields.number("factor"))
    if kind == "llama3":
        original = config.optional_integer("original_max_position_embeddings", least=1)
        return RopeConfig(
            theta=theta,
            scaling="llama3",
            factor=fields.number("factor"),
            low_freq_factor=fields.number("low_freq_factor"),
            high_freq_factor=fields.number("high_freq_factor"),
            original_max_position_embeddings=original
            or fields.integer("original_max_position_embeddings", max_positions),
        )
    raise UserError(f"{source}: rope type {shown(kind)} is not supported; supported are default, linear, llama3")


def _layer_windows(fields: ConfigFields, num_layers: int, family: Family) -> tuple[int | None, ...]:
    """Qwen's sliding windows: by `layer_types`, else on the layers from `max_window_layers` up. Llama has none."""
    config, source = fields.values, fields.source
    sliding = family != "llama" and fields.flag("use_sliding_window") and config.get("sliding_window", 4096) is not None
    window = fields.integer("sliding_window", 4096) if sliding else None
    layer_types = fields.texts("layer_types")
    first = fields.integer("max_window_layers", 28, least=0)
    if not fields.has("layer_types"):
        if window is not None and "max_window_layers" in config and not fields.has("max_window_layers"):
            raise UserError(f"{source}: max_window_layers is null, but use_sliding_window is on; name the first layer")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(layer_types) != num_layers:
        raise UserError(f"{source}: layer_types names {len(layer_types)} layers, num_hidden_layers is {num_layers}")
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
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)
