"""A GGUF file's sizes and options under the keys of a Hugging Face config.json. Imports neither numpy nor torch.

The meanings of the file's keys, and of missing keys, follow llama.cpp.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from spec_lab.checkpoints.checks import refuse_values
from spec_lab.checkpoints.gguf_file import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, GgufFile, read_head

ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
READ_KEYS = (
    "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length",
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length",
    "attention.value_length", "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
)  # fmt: skip
NOTHING_SAID = ("tensor_data_layout", "rope.scaling.finetuned")
"""Keys that are not read, since they do not change the forward pass."""
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
    name = file.text("general.architecture")
    refuse_values(str(path), {"general.architecture": name}, {"general.architecture": ARCHITECTURES})
    _refuse_unknown_keys(file, name)
    heads = file.integer(f"{name}.attention.head_count")
    hidden = file.integer(f"{name}.embedding_length")
    max_positions = file.integer(f"{name}.context_length")
    biases = file.places.keys() & {"blk.0.attn_q.bias", "blk.0.ffn_gate.bias"}
    return {
        "architectures": [ARCHITECTURES[name]],
        "vocab_size": file.places["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": file.integer(f"{name}.feed_forward_length"),
        "num_hidden_layers": file.integer(f"{name}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.integer(f"{name}.attention.head_count_kv", heads),
        "head_dim": _head_dim(file, name, hidden // heads),
        "max_position_embeddings": max_positions,
        "rms_norm_eps": file.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "rope_theta": file.number(f"{name}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, name),
        "tie_word_embeddings": "output.weight" not in file.places,
        "attention_bias": "blk.0.attn_q.bias" in biases,
        "mlp_bias": "blk.0.ffn_gate.bias" in biases,
        "bos_token_id": next(iter(file.integers("tokenizer.ggml.bos_token_id")), None),
        "eos_token_id": _end_tokens(file),
    }


def _refuse_unknown_keys(file: GgufFile, name: str) -> None:
    """Refuse keys of the architecture that are not read here, since they may change the forward pass."""
    known = {f"{name}.{key}" for key in (*READ_KEYS, *NOTHING_SAID)}
    if file.text(f"{name}.rope.scaling.type", "none") == "longrope":
        known.add(f"{name}.{AMPLITUDE}")
    unknown = [key for key in file.metadata if key.startswith(f"{name}.") and key not in known]
    # Converters write a zero count for parts that a model does not have.
    neutral = {f"{name}.{AMPLITUDE}": (1.0,)}
    unread = [key for key in unknown if file.metadata[key] not in neutral.get(key, (0, False))]
    refuse_values(str(file.path), file.metadata, dict.fromkeys(unread, ()))


def _head_dim(file: GgufFile, name: str, default: int) -> int:
    size = file.integer(f"{name}.attention.key_length", default)
    keys = (f"{name}.attention.value_length", f"{name}.rope.dimension_count")
    refuse_values(str(file.path), file.metadata, dict.fromkeys(keys, (size,)))
    return size


def _end_tokens(file: GgufFile) -> list[int]:
    """Return the tokens that end a text, a turn or a message, without duplicates."""
    keys = (f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom"))
    return list(dict.fromkeys(token for key in keys for token in file.integers(key)))


def _rope_scaling(file: GgufFile, name: str) -> dict[str, Any] | None:
    factors = _rope_factors(file, ROPE_FACTORS)
    kind = file.text(f"{name}.rope.scaling.type", "none")
    if factors is not None:
        return _llama3_rope(file, name, factors)
    if kind == "none":
        return None
    scaling = f"{name}.rope.scaling"
    found: dict[str, Any] = {"rope_type": kind}
    original = file.integer(f"{scaling}.original_context_length", 0)
    if original:
        found["original_max_position_embeddings"] = original
    if kind == "longrope":
        long, short = (_rope_factors(file, tensor) for tensor in (LONG_FACTORS, SHORT_FACTORS))
        amplitude = file.number(f"{name}.{AMPLITUDE}", 1.0)
        return found | {"long_factor": long, "short_factor": short, "attention_factor": amplitude}
    if kind == "yarn":
        found["beta_fast"] = file.number(f"{scaling}.yarn_beta_fast", 32.0)
        found["beta_slow"] = file.number(f"{scaling}.yarn_beta_slow", 1.0)
    return found | {"factor": file.number(f"{scaling}.factor")}


def _rope_factors(file: GgufFile, tensor: str) -> list[float] | None:
    """Return the divisor of each frequency; None if there are none, or all of Llama 3's are 1."""
    place = file.places.get(tensor)
    if place is None:
        return None
    count = prod(place.shape)
    with file.path.open("rb") as source:
        source.seek(file.data_start + place.offset)
        factors = list(struct.unpack(f"<{count}f", source.read(4 * count)))
    return None if tensor == ROPE_FACTORS and all(factor == 1.0 for factor in factors) else factors


def _llama3_rope(file: GgufFile, name: str, factors: list[float]) -> dict[str, Any]:
    """Find the Llama 3 scaling that has these divisors; the largest divisor, that of the slowest pair, is its
    factor."""
    scaling = LLAMA3_ROPE | {"factor": round(max(factors), 4)}
    theta = file.number(f"{name}.rope.freq_base", 10000.0)
    expected = [llama3_divisor(theta ** (-pair / len(factors)), scaling) for pair in range(len(factors))]
    if not all(math.isclose(*both, rel_tol=1e-4) for both in zip(factors, expected, strict=True)):
        refuse_values(str(file.path), {ROPE_FACTORS: "other than Llama 3's"}, {ROPE_FACTORS: ()})
    return {"rope_type": "llama3", **scaling}


def llama3_divisor(frequency: float, scaling: Mapping[str, float]) -> float:
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = min(1.0, max(0.0, (turns - low) / (high - low)))
    return 1.0 / ((1.0 - kept) / scaling["factor"] + kept)
