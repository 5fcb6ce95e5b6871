"""Writes a llama target and its EAGLE-3 head as GGUF files for llama.cpp, all weights in float32.

The file of a head also has the target's vocabulary. Its `d2t` has token ids, where a checkpoint has distances. Pairs of
numbers that are rotated together are neighbours in llama.cpp, so rows of queries and keys change places.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from spec_lab.checkpoints.families.table import read_model_config
from spec_lab.checkpoints.gguf_file import read_head

NAMES = {
    "fc": "fc",
    "norm": "output_norm",
    "lm_head": "output",
    "midlayer.hidden_norm": "blk.0.attn_norm_2",
    "midlayer.input_layernorm": "blk.0.attn_norm",
    "midlayer.post_attention_layernorm": "blk.0.ffn_norm",
    "midlayer.mlp.down_proj": "blk.0.ffn_down",
    "midlayer.mlp.gate_proj": "blk.0.ffn_gate",
    "midlayer.mlp.up_proj": "blk.0.ffn_up",
    "midlayer.self_attn.q_proj": "blk.0.attn_q",
    "midlayer.self_attn.k_proj": "blk.0.attn_k",
    "midlayer.self_attn.v_proj": "blk.0.attn_v",
    "midlayer.self_attn.o_proj": "blk.0.attn_output",
}


def write_target(path: Path, source: Path) -> None:
    """Write the target of a GGUF file with its weights in float32."""
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(path, "llama")
    _copy_fields(writer, reader, "")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        wide = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, np.ascontiguousarray(wide).reshape(shape))
    _write(writer)


def architecture(path: Path) -> str:
    """Return the name of a file's architecture."""
    return str(read_head(path).metadata["general.architecture"])


def write_head(path: Path, folder: Path, target: Path) -> None:
    """Write the EAGLE-3 head of a checkpoint folder, for the target in the GGUF file `target`."""
    num_layers = read_model_config(target).num_layers
    config = json.loads((folder / "config.json").read_text())
    tensors = {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}
    writer = gguf.GGUFWriter(path, "eagle3")
    writer.add_block_count(1)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_array("eagle3.target_layers", [2, num_layers // 2, num_layers - 3])
    writer.add_uint32("eagle3.target_hidden_size", config["hidden_size"])
    writer.add_bool("eagle3.norm_before_residual", config["norm_before_residual"])
    writer.add_bool("eagle3.norm_before_fc", False)
    _copy_fields(writer, gguf.GGUFReader(target), "tokenizer.")
    num_heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for ours, theirs in NAMES.items():
        weight = tensors[f"{ours}.weight"].float()
        if (heads := num_heads.get(ours.rpartition(".")[2])) is not None:
            weight = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(f"{theirs}.weight", np.ascontiguousarray(weight.numpy()))
    tokens = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    writer.add_tensor("d2t", tokens.numpy().astype(np.int64), raw_dtype=gguf.GGMLQuantizationType.I64)
    _write(writer)


def _copy_fields(writer: gguf.GGUFWriter, reader: gguf.GGUFReader, prefix: str) -> None:
    """Copy the metadata whose names begin with `prefix`, but what the writer sets itself."""
    own = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
    for name, field in reader.fields.items():
        if not name.startswith(prefix) or name.startswith(own):
            continue
        if field.types[0] is gguf.GGUFValueType.ARRAY:
            writer.add_array(name, field.contents())
        else:
            writer.add_key_value(name, field.contents(), field.types[0])


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
