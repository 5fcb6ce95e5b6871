"""A GGUF file's sizes and options under the keys of a Hugging Face config.json. Imports torch for a rope of tensors
only.

The meanings of the file's keys, and of missing keys, follow llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_lab.checkpoints.gguf_file import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, GgufFile, read_head
from spec_lab.checkpoints.json_input import refuse_values

Keys = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the files of a family have beyond a Llama's.

    Attributes:
        model_type: transformers' name of the family.
        keys: the file's keys by those of config.json.
        rope: what every model of the family has, and its file does not say.
    """

    model_type: str
    keys: Keys = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=dict)


STATES = "ssm.conv_kernel"
DELTA_NET: Keys = {
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_key_head_dim": "ssm.state_size",
    "linear_value_head_dim": "ssm.state_size",
    "linear_conv_kernel_dim": STATES,
    "mtp_num_hidden_layers": "nextn_predict_layers",
}
EXPERTS: Keys = {
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama"),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen35": Architecture("qwen3_5_text", DELTA_NET),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        {
            **DELTA_NET,
            **EXPERTS,
            "num_experts": "expert_count",
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        {
            **EXPERTS,
            "num_local_experts": "expert_count",
            "intermediate_size": "expert_feed_forward_length",
            "sliding_window": "attention.sliding_window",
        },
        rope={"truncate": False},  # llama.cpp's own tables are rounded to whole channels
    ),
}
"""The families by llama.cpp's names."""
COMMON: Keys = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
OTHERS_READ = (
    "vocab_size", "block_count", "attention.value_length", "rope.dimension_count", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)  # fmt: skip
INTERVAL, RECURRENT = "full_attention_interval", "attention.recurrent_layers"
NOTHING_SAID = ("tensor_data_layout", "rope.scaling.finetuned", "rope.dimension_sections", "ssm.inner_size")
"""Keys that are not read, since they do not change the forward pass of a text, or follow from others."""
AMPLITUDE = "rope.scaling.attn_factor"
"""The factor of cosines and sines. It is read with `longrope`; elsewhere it must be 1."""

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The constants of every Llama 3.1, 3.2 and 3.3; the file has only their result, a divisor for each frequency."""


def gguf_config(path: Path) -> dict[str, Any]:
    """Return the keys that the model's config.json would have.

    Raises:
        UserError: the errors of `read_head`; another architecture, a key that is missing or not understood, or sizes
            that do not fit one another.
    """
    file = read_head(path)
    sizes = file.sizes
    refuse_values(str(path), file.metadata, {"general.architecture": ARCHITECTURES})
    family = ARCHITECTURES[file.architecture]
    heads, hidden = sizes["attention.head_count"], sizes["embedding_length"]
    usual = {"feed_forward_length": None, "attention.head_count_kv": heads, "rope.freq_base": 10000.0}
    said = {**usual, "attention.key_length": hidden // heads, **sizes}
    head_dim = said["attention.key_length"]
    _refuse_unknown_keys(file, family, head_dim)
    ends = [token for end in ("eos", "eot", "eom") for token in file.ids(f"{end}_token_id")]
    rope = {**_rope_scaling(file), **family.rope}
    if STATES in family.keys.values():  # `rope.dimension_count` may be less than a head
        rope = {"rope_type": "default", **rope, "partial_rotary_factor": sizes["rope.dimension_count"] / head_dim}
    config = {
        "model_type": family.model_type,
        **{name: said[key] for name, key in COMMON.items()},
        "vocab_size": file.places["token_embd.weight"].shape[0],
        "num_hidden_layers": sizes["block_count"] - sizes.get("nextn_predict_layers", 0),
        "rope_scaling": rope or None,
        "tie_word_embeddings": "output.weight" not in file.places,
        "attention_bias": "blk.0.attn_q.bias" in file.places,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.places,
        "bos_token_id": next(iter(file.ids("bos_token_id")), None),
        "eos_token_id": list(dict.fromkeys(ends)),
    }
    if STATES in sizes:
        layers = range(config["num_hidden_layers"])
        linear = sizes.get(RECURRENT) or [(layer + 1) % sizes.get(INTERVAL, 4) for layer in layers]
        config["layer_types"] = ["linear_attention" if linear[layer] else "full_attention" for layer in layers]
    return config | {name: sizes[key] for name, key in family.keys.items() if key in sizes}


def _refuse_unknown_keys(file: GgufFile, family: Architecture, size: int) -> None:
    """Refuse keys of the architecture that are not read here, since they may change the forward pass. Converters write
    a zero count for parts that a model does not have. `size` is that of a head."""
    sizes, has_states = file.sizes, STATES in family.keys.values()
    read = {*COMMON.values(), *OTHERS_READ, *NOTHING_SAID, *family.keys.values()}
    read |= {INTERVAL, RECURRENT} if has_states else set()
    supported: dict[str, tuple[Any, ...]] = dict.fromkeys(sizes.keys() - read, (0, False))
    supported["attention.value_length"] = (size,)
    if not has_states:
        supported["rope.dimension_count"] = (size,)
    supported[AMPLITUDE] = (1.0,) if sizes.get("rope.scaling.type") != "longrope" else (sizes.get(AMPLITUDE),)
    named = {f"{file.architecture}.{key}": values for key, values in supported.items()}
    refuse_values(str(file.path), file.metadata, named)


def _rope_scaling(file: GgufFile) -> dict[str, Any]:
    sizes, factors = file.sizes, _rope_factors(file, ROPE_FACTORS)
    kind = sizes.get("rope.scaling.type", "none")
    if factors is not None and any(factor != 1.0 for factor in factors):
        return _llama3_rope(file, factors)
    if kind == "none":
        return {}
    keys = {
        "factor": "factor",
        "original_max_position_embeddings": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    named = {key: sizes[f"rope.scaling.{name}"] for key, name in keys.items() if sizes.get(f"rope.scaling.{name}")}
    if kind == "longrope":
        named["attention_factor"] = sizes.get(AMPLITUDE, 1.0)
        named |= {"long_factor": _rope_factors(file, LONG_FACTORS), "short_factor": _rope_factors(file, SHORT_FACTORS)}
    return {"rope_type": kind, **named}


def _rope_factors(file: GgufFile, tensor: str) -> list[float] | None:
    """Return the divisor of each frequency; None if there are none."""
    from spec_lab.checkpoints.gguf import dequantised

    place = file.places.get(tensor)
    divisors: list[float] | None = None if place is None else dequantised(file, place).tolist()
    return divisors


def _llama3_rope(file: GgufFile, factors: list[float]) -> dict[str, Any]:
    """Find the Llama 3 scaling that has these divisors; the largest divisor, that of the slowest pair, is its
    factor."""
    scaling = LLAMA3_ROPE | {"factor": round(max(factors), 4)}
    theta = file.sizes.get("rope.freq_base", 10000.0)
    expected = [llama3_divisor(theta ** (-pair / len(factors)), scaling) for pair in range(len(factors))]
    if not all(math.isclose(*both, rel_tol=1e-4) for both in zip(factors, expected, strict=True)):
        refuse_values(str(file.path), {ROPE_FACTORS: "other than Llama 3's"}, {ROPE_FACTORS: ()})
    return {"rope_type": "llama3", **scaling}


def llama3_divisor(frequency: float, scaling: Mapping[str, float]) -> float:
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = min(1.0, max(0.0, (turns - low) / (high - low)))
    return 1.0 / ((1.0 - kept) / scaling["factor"] + kept)
