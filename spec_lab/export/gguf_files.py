"""Writes GGUF files for llama.cpp, all weights in float32: a target, or an EAGLE-3 head.

llama.cpp rotates neighbouring channels in a Llama and in an EAGLE-3 head, so the rows of their queries and keys are
interleaved. The file of a head also has the target's vocabulary. Names and keys are those of llama.cpp's converter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from spec_lab.checkpoints.eagle3_checkpoint import Eagle3Config, load_eagle3
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.gguf import dequantised
from spec_lab.checkpoints.gguf_config import llama3_divisor
from spec_lab.checkpoints.gguf_file import ROPE_FACTORS, GgufFile, is_gguf, read_head
from spec_lab.checkpoints.plan import RopeConfig
from spec_lab.core.errors import UserError

Tensors = Mapping[str, tuple[tuple[int, ...], Callable[[], torch.Tensor]]]
"""By name, the shape of a tensor and what reads or makes it."""

EAGLE3_NAMES = {
    "input_norm": "enc.output_norm",
    "fc": "fc",
    "midlayer.hidden_norm": "blk.0.attn_norm_2",
    "midlayer.input_layernorm": "blk.0.attn_norm",
    "midlayer.self_attn.q_proj": "blk.0.attn_q",
    "midlayer.self_attn.k_proj": "blk.0.attn_k",
    "midlayer.self_attn.v_proj": "blk.0.attn_v",
    "midlayer.self_attn.o_proj": "blk.0.attn_output",
    "midlayer.post_attention_layernorm": "blk.0.ffn_norm",
    "midlayer.mlp.gate_proj": "blk.0.ffn_gate",
    "midlayer.mlp.up_proj": "blk.0.ffn_up",
    "midlayer.mlp.down_proj": "blk.0.ffn_down",
    "norm": "output_norm",
    "lm_head": "output",
    "embed_tokens": "token_embd",
}


def write_target(path: Path, source: Path) -> None:
    """Write the target of a GGUF file with its weights in float32: with others llama.cpp rounds activations too."""
    file = opened_gguf(source)
    write_file(path, file.architecture, *target_parts(file))


def target_parts(file: GgufFile) -> tuple[dict[str, Any], Tensors]:
    """Return the keys of a file but for those that say how it is stored, and its tensors in float32."""
    written_by_us = ("general.architecture", "general.file_type", "general.quantization_version", "general.alignment")
    keys = {key: value for key, value in file.metadata.items() if key not in written_by_us}
    return keys, {place.name: (place.shape, partial(dequantised, file, place)) for place in file.places.values()}


def write_eagle3(path: Path, folder: Path, target: Path) -> None:
    """Write the EAGLE-3 head in `folder` for the target in a GGUF file.

    Raises:
        UserError: the target is in no GGUF file, the head is another's, or it has a part that llama.cpp lacks.
    """
    model = read_model_config(opened_gguf(target).path)
    head, weights = load_eagle3(folder, model, torch.float32, "cpu")
    _refuse_lacking(head, folder)
    layer = head.layer.only_layer
    tensors: dict[str, torch.Tensor] = {}
    for name, theirs in EAGLE3_NAMES.items():
        weight = weights.get(f"{name}.weight")
        if weight is not None:
            heads = {"attn_q": layer.num_heads, "attn_k": layer.num_kv_heads}.get(theirs.rpartition(".")[2])
            tensors[f"{theirs}.weight"] = weight if heads is None else interleaved(weight, heads)
    if "d2t" in weights:  # token ids, where a checkpoint has distances
        tensors["d2t"] = weights["d2t"] + torch.arange(head.draft_vocab_size)
    if layer.rope.scaling == "llama3":
        tensors[ROPE_FACTORS] = _divisors(layer.rope, layer.head_dim)
    vocabulary = {key: value for key, value in opened_gguf(target).metadata.items() if key.startswith("tokenizer.")}
    made: Tensors = {name: (tuple(value.shape), partial(tensors.__getitem__, name)) for name, value in tensors.items()}
    write_file(path, "eagle3", _eagle3_keys(head) | vocabulary, made)


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Let the two halves of each head's rows [num_heads * head_dim, ...] alternate."""
    return weight.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def opened_gguf(path: Path) -> GgufFile:
    """Read the header of a target's file; UserError if it is none."""
    if not is_gguf(path):
        raise UserError(f"{path} is no GGUF file; llama.cpp's convert_hf_to_gguf.py makes one of a target's folder")
    return read_head(path)


def _refuse_lacking(head: Eagle3Config, folder: Path) -> None:
    layer = head.layer.only_layer
    lacking = {
        "a norm for each tap (fc_norm)": head.fc_norm,
        "a normed output that is fed back (norm_output)": head.norm_output,
        "latent attention": layer.latent is not None,
        "norms of queries and keys": layer.qk_norm,
        "biases": layer.qkv_bias or layer.o_bias or layer.mlp_bias,
        f"the rope scaling {layer.rope.scaling}": layer.rope.scaling not in ("none", "linear", "llama3"),
    }
    found = next((part for part, is_there in lacking.items() if is_there), None)
    if found is not None:
        raise UserError(f"{folder}: llama.cpp's EAGLE-3 heads have no {found.removeprefix('a ')}; use to=hf")


def _eagle3_keys(head: Eagle3Config) -> dict[str, Any]:
    sizes, layer = head.layer, head.layer.only_layer
    keys: dict[str, Any] = {
        "block_count": 1,
        "context_length": sizes.max_position_embeddings,
        "embedding_length": sizes.hidden_size,
        "feed_forward_length": layer.intermediate_size,
        "vocab_size": sizes.vocab_size,
        "attention.head_count": layer.num_heads,
        "attention.head_count_kv": layer.num_kv_heads,
        "attention.key_length": layer.head_dim,
        "attention.value_length": layer.head_dim,
        "attention.layer_norm_rms_epsilon": sizes.rms_norm_eps,
        "rope.dimension_count": layer.head_dim,
        "rope.freq_base": layer.rope.theta,
        "target_layers": list(head.tap_layer_inputs),
        "target_hidden_size": head.target_hidden_size,
        "norm_before_residual": head.norm_before_residual,
        "norm_before_fc": head.norm_before_fc,
    }
    if layer.rope.scaling == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": layer.rope.factor}
    return {f"eagle3.{key}": value for key, value in keys.items()}


def _divisors(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    scaling = {
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
    }
    frequencies = [rope.theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]
    return torch.tensor([llama3_divisor(frequency, scaling) for frequency in frequencies], dtype=torch.float32)


def write_file(path: Path, architecture: str, keys: Mapping[str, Any], tensors: Tensors) -> None:
    """Write one file, a tensor in memory at a time. `d2t` is int64, all others are float32."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for key, value in keys.items():
        _add(writer, key, value)
    for name, (shape, _) in tensors.items():
        dtype = np.dtype(np.int64 if name == "d2t" else np.float32)
        writer.add_tensor_info(name, shape, dtype, int(np.prod(shape)) * dtype.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, read in tensors.values():
        writer.write_tensor_data(np.ascontiguousarray(read().numpy()))
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a value with the type that converters give it."""
    adds: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        str: writer.add_string,
        float: writer.add_float32,
        int: writer.add_uint32,
        list: writer.add_array,
    }
    if value != []:  # the writer knows no type for it, and llama.cpp takes a missing list for it
        adds[type(value)](key, value)
