"""Sizes and options of a decoder, read from the config.json of a Hugging Face folder without transformers.

Both spellings are read: the one of the files on the hub (`rope_theta`, `rope_scaling`, `torch_dtype`) and the one that
transformers 5 writes (`rope_parameters`, `dtype`). A key the file leaves out has the value transformers gives it; an
option that would change the forward pass and that the lean code lacks is refused, never skipped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from spec_lab.errors import UserError

Family = Literal["llama", "qwen2", "qwen3"]
RopeScaling = Literal["none", "linear", "llama3"]

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MiMoForCausalLM": "qwen2",
}
MTP_COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


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
    """What the forward code needs to know of a decoder.

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
        family = _family(config, source)
        _refuse_unsupported(config, source)
        qwen = family != "llama"
        num_layers = fields.integer("num_hidden_layers")
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
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            max_position_embeddings=max_positions,
            rope=_rope(config, max_positions, source),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            qkv_bias=attention_bias or family == "qwen2",
            o_bias=attention_bias,
            mlp_bias=family == "llama" and fields.flag("mlp_bias"),
            qk_norm=family == "qwen3",
            layer_windows=_layer_windows(fields, num_layers, family),
            eos_token_ids=_token_ids(config.get("eos_token_id", None if qwen else 2), source),
            bos_token_id=config.get("bos_token_id", None if qwen else 1),
            torch_dtype=_dtype_name(config),
        )


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """Typed access to the keys of a JSON file; JSON null counts as absent."""

    values: Mapping[str, Any]
    source: str

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{self.source}: {key} must be a positive integer, is {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise UserError(f"{self.source}: {key} must be a positive number, is {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise UserError(f"{self.source}: {key} must be true or false, is {value!r}")
        return value

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise UserError(f"{self.source}: {key} is missing")
        return value


def read_model_config(folder: Path, knob: str = "target.path") -> ModelConfig:
    """Read config.json, and the stop tokens of generation_config.json where that file names some.

    Args:
        knob: the setting that led here, named in errors.

    Raises:
        UserError: no such folder or file, no JSON object, or what `ModelConfig.from_dict` refuses.
    """
    config = ModelConfig.from_dict(read_config_json(folder, knob), str(folder / "config.json"))
    generation = folder / "generation_config.json"
    if not generation.exists():
        return config
    stop_ids = _token_ids(read_json(generation).get("eos_token_id"), str(generation))
    return replace(config, eos_token_ids=stop_ids or config.eos_token_ids)


def read_config_json(folder: Path, knob: str) -> dict[str, Any]:
    """The config.json of a checkpoint folder, as it stands in the file."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; {knob} must name one with config.json and model.safetensors")
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder}: has no config.json; {knob} must name a Hugging Face checkpoint folder")
    return read_json(path)


def num_mtp_modules(config: Mapping[str, Any]) -> int:
    """How many multi-token prediction modules a config.json names; 0 when it names none."""
    decoder = config.get("text_config") or config
    return next((decoder[key] for key in MTP_COUNT_KEYS if isinstance(decoder.get(key), int)), 0)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read as JSON ({reason}); fetch the file again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold a JSON object, holds a {type(content).__name__}")
    return content


def _family(config: Mapping[str, Any], source: str) -> Family:
    architectures = config.get("architectures") or []
    for name in architectures:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    found = ", ".join(map(str, architectures)) or "none named"
    raise UserError(f"{source}: architecture {found} is not supported; supported are {', '.join(ARCHITECTURES)}")


def _refuse_unsupported(config: Mapping[str, Any], source: str) -> None:
    activation = config.get("hidden_act") or "silu"
    if activation != "silu":
        raise UserError(f"{source}: hidden_act {activation!r} is not supported; supported is 'silu'")
    if config.get("quantization_config"):
        raise UserError(f"{source}: quantized checkpoints are not supported; use the float16, bfloat16 or float32 one")


def _rope(config: Mapping[str, Any], max_positions: int, source: str) -> RopeConfig:
    parameters = _shared_rope_parameters(config.get("rope_scaling") or config.get("rope_parameters") or {}, source)
    fields = ConfigFields(parameters, f"{source} (rope)")
    theta = fields.number("rope_theta", config.get("rope_theta") or 10000.0)
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    if partial != 1.0:
        raise UserError(f"{source}: partial_rotary_factor {partial} is not supported; supported is 1.0")
    kind = parameters.get("rope_type", parameters.get("type")) or "default"
    if kind == "default":
        return RopeConfig(theta=theta, scaling="none")
    if kind == "linear":
        return RopeConfig(theta=theta, scaling="linear", factor=fields.number("factor"))
    if kind == "llama3":
        original = config.get("original_max_position_embeddings")
        return RopeConfig(
            theta=theta,
            scaling="llama3",
            factor=fields.number("factor"),
            low_freq_factor=fields.number("low_freq_factor"),
            high_freq_factor=fields.number("high_freq_factor"),
            original_max_position_embeddings=original
            or fields.integer("original_max_position_embeddings", max_positions),
        )
    raise UserError(f"{source}: rope type {kind!r} is not supported; supported are default, linear, llama3")


def _shared_rope_parameters(parameters: Any, source: str) -> Mapping[str, Any]:
    """One set of rope parameters, also where transformers 5 keys them by layer type."""
    if not isinstance(parameters, dict):
        raise UserError(f"{source}: rope parameters must be an object, are {parameters!r}")
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    if not nested:
        return parameters
    if any(value != nested[0] for value in nested):
        raise UserError(f"{source}: rope parameters that differ by layer type are not supported; one set for all is")
    return nested[0]


def _layer_windows(fields: ConfigFields, num_layers: int, family: Family) -> tuple[int | None, ...]:
    """Qwen's sliding windows: by `layer_types`, else on the layers from `max_window_layers` up. Llama has none."""
    config, source = fields.values, fields.source
    sliding = family != "llama" and fields.flag("use_sliding_window") and config.get("sliding_window", 4096) is not None
    window = fields.integer("sliding_window", 4096) if sliding else None
    layer_types = config.get("layer_types")
    if layer_types is None:
        first = config.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(layer_types) != num_layers:
        raise UserError(f"{source}: layer_types names {len(layer_types)} layers, num_hidden_layers is {num_layers}")
    for layer_type in layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise UserError(
                f"{source}: layer type {layer_type!r} is not supported; supported are full_attention, sliding_attention"
            )
    if window is None and "sliding_attention" in layer_types:
        raise UserError(
            f"{source}: layer_types has sliding_attention, but use_sliding_window or sliding_window is unset"
        )
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def _token_ids(value: Any, source: str) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in ids):
        raise UserError(f"{source}: eos_token_id must be an integer or a list of integers, is {value!r}")
    return tuple(ids)


def _dtype_name(config: Mapping[str, Any]) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    return str(name).removeprefix("torch.")
