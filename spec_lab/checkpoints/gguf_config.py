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

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""llama.cpp's names, which are also the model types of transformers."""
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
    name, sizes = file.architecture, file.sizes
    refuse_values(str(path), file.metadata, {"general.architecture": ARCHITECTURES})
    _refuse_unknown_keys(file)
    heads, hidden = sizes["attention.head_count"], sizes["embedding_length"]
    ends = [token for end in ("eos", "eot", "eom") for token in file.ids(f"{end}_token_id")]
    return {
        "model_type": name,
        "vocab_size": file.places["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": sizes["feed_forward_length"],
        "num_hidden_layers": sizes["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": sizes.get("attention.head_count_kv", heads),
        "head_dim": sizes.get("attention.key_length", hidden // heads),
        "max_position_embeddings": sizes["context_length"],
        "rms_norm_eps": sizes["attention.layer_norm_rms_epsilon"],
        "rope_theta": sizes.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file),
        "tie_word_embeddings": "output.weight" not in file.places,
        "attention_bias": "blk.0.attn_q.bias" in file.places,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.places,
        "bos_token_id": next(iter(file.ids("bos_token_id")), None),
        "eos_token_id": list(dict.fromkeys(ends)),
    }


def _refuse_unknown_keys(file: GgufFile) -> None:
    """Refuse keys of the architecture that are not read here, since they may change the forward pass, and heads of
    which a part is rotated. Converters write a zero count for parts that a model does not have."""
    sizes = file.sizes
    size = sizes.get("attention.key_length", sizes["embedding_length"] // sizes["attention.head_count"])
    supported: dict[str, tuple[Any, ...]] = dict.fromkeys(sizes.keys() - {*READ_KEYS, *NOTHING_SAID}, (0, False))
    supported |= dict.fromkeys(("attention.value_length", "rope.dimension_count"), (size,))
    supported[AMPLITUDE] = (1.0,) if sizes.get("rope.scaling.type") != "longrope" else (sizes.get(AMPLITUDE),)
    named = {f"{file.architecture}.{key}": values for key, values in supported.items()}
    refuse_values(str(file.path), file.metadata, named)


def _rope_scaling(file: GgufFile) -> dict[str, Any] | None:
    sizes, factors = file.sizes, _rope_factors(file, ROPE_FACTORS)
    kind = sizes.get("rope.scaling.type", "none")
    if factors is not None and any(factor != 1.0 for factor in factors):
        return _llama3_rope(file, factors)
    if kind == "none":
        return None
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
    place = file.places.get(tensor)
    if place is None:
        return None
    count = prod(place.shape)
    with file.path.open("rb") as source:
        source.seek(file.data_start + place.offset)
        return list(struct.unpack(f"<{count}f", source.read(4 * count)))


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
