"""Helpers that write tiny GGUF files with the `gguf` package's own writer, as llama.cpp's converter lays them out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE_BLOCKS = {"intermediate_size": 64, "hidden_size": 32}
"""These sizes are multiples of the 32 numbers of a block, of which quantized rows are made."""

BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
ALPHABET = [chr(byte) for byte in BYTES] + [chr(256 + index) for index in range(256 - len(BYTES))]
"""This is how GPT-2 spells the 256 bytes: printable ones as they are, then the others in their order."""

MERGES = ["Ġ t", "h e", "Ġt he", "Ġ Ġ", "ĠĠ ĠĠ", "1 2", "Ġ 7", "o n", "c e", "on ce", "' s", "Ċ Ċ"]
UNMERGED = ["Ġseven"]
"""No merges make this token."""
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<think>"]


def in_transformers(path: Path, **changes: Any) -> Any:
    """The model that transformers' own reader makes of a file. Its `from_pretrained` does the same, but asks for
    accelerate. `changes` are to the config: of Qwen3, it does not read `key_length`."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with pytest.MonkeyPatch.context() as patch, no_init_weights():
        # It reads the file twice, and makes the table of names anew for each module.
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, cache(getattr(gguf, name)))
        # Each of 49 000 tokens is a few slices of a memory map, whose slices are Python's and not numpy's.
        patch.setattr(np, "memmap", lambda path, **_: np.fromfile(path, np.uint8))
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False, **changes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model.eval()


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Interleave the two halves of each head's rows, as the converter does for Llama."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: Any,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    pre: str | None = None,
) -> Path:
    """Write a transformers model of Llama, Qwen2 or Qwen3, its matrices in `kind`.

    Args:
        keys: written in place of those of the model; None leaves one out.
        tensors: the same of tensors.
        pre: with a tokenizer, whose text is cut so.
    """
    config, name = model.config, model.config.model_type
    writer = GGUFWriter(path, name)
    head_dim = model.state_dict()["model.layers.0.self_attn.q_proj.weight"].shape[0] // config.num_attention_heads
    said: dict[str, Any] = {
        f"{name}.vocab_size": config.vocab_size,
        f"{name}.context_length": config.max_position_embeddings,
        f"{name}.embedding_length": config.hidden_size,
        f"{name}.block_count": config.num_hidden_layers,
        f"{name}.feed_forward_length": config.intermediate_size,
        f"{name}.attention.head_count": config.num_attention_heads,
        f"{name}.attention.head_count_kv": config.num_key_value_heads,
        f"{name}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{name}.attention.key_length": head_dim,
        f"{name}.attention.value_length": head_dim,
        f"{name}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        f"{name}.rope.dimension_count": head_dim,
        "tokenizer.ggml.eos_token_id": 2,
    }
    said |= {} if pre is None else tokenizer_keys(config.vocab_size, pre)
    add_keys(writer, said | dict(keys or {}))
    for tensor, value in (stored_tensors(model) | dict(tensors or {})).items():
        if value is not None:
            stored = kind if value.ndim == 2 else GGMLQuantizationType.F32
            writer.add_tensor(tensor, quantize(value, stored), raw_dtype=stored)
    return finish(writer, path)


def stored_tensors(model: Any) -> dict[str, np.ndarray]:
    """The model's weights by their names in the file."""
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    stored = {}
    for name, tensor in model.state_dict().items():
        whole, _, last = name.rpartition(".")
        if whole == "lm_head" and config.tie_word_embeddings:
            continue
        _, _, layer, *inner = whole.split(".") if whole.startswith("model.layers.") else ("", "", "", whole)
        value = tensor.detach().to(torch.float32).numpy()
        projection = inner[-1].rpartition(".")[2]
        if config.model_type == "llama" and projection in heads:
            value = permuted(value, heads[projection])
        prefix = f"blk.{layer}." if layer else ""
        stored[f"{prefix}{NAMES['.'.join(inner)]}.{last}"] = np.ascontiguousarray(value)
    return stored


def tokenizer_keys(vocab_size: int, pre: str) -> dict[str, Any]:
    """A vocabulary of special tokens, the bytes, and a few merges."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    known = [*CONTROL, *ALPHABET, *merged, *UNMERGED, *USER_DEFINED]
    padding = [f"[PAD{index}]" for index in range(vocab_size - len(known))]
    types = (
        [3] * len(CONTROL) + [1] * (256 + len(merged) + len(UNMERGED)) + [4] * len(USER_DEFINED) + [5] * len(padding)
    )
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*known, *padding],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
        "message['content'] + '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}",
    }


def write_head(path: Path, keys: Mapping[str, Any], architecture: str = "llama") -> Path:
    """Write a file of metadata alone."""
    writer = GGUFWriter(path, architecture)
    add_keys(writer, keys)
    return finish(writer, path)


def add_keys(writer: GGUFWriter, keys: Mapping[str, Any]) -> None:
    for key, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)


def finish(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
