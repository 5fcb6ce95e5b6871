"""A helper that writes a tiny Qwen3.5 as a GGUF file, as llama.cpp's converter lays it out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from tests.tiny_gguf import add_keys, finish, tokenizer_keys

SIZES: dict[str, Any] = {"vocab_size": 300, "linear_value_head_dim": 8, "linear_num_value_heads": 2}
"""llama.cpp has one head size for keys and values; with as many heads of both, none change places."""
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_qwen35(path: Path, model: Any) -> Path:
    """Write transformers' model of `SIZES` in float32. Norms multiply by their weight here, not by 1 + weight."""
    config = model.config
    rotated = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
    sizes: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "rope.dimension_count": rotated,
        "rope.dimension_sections": [rotated // 2 - 2, 1, 1, 0],
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.group_count": config.linear_num_key_heads,
        "full_attention_interval": 4,
    }
    writer = GGUFWriter(path, "qwen35")
    tokenizer = tokenizer_keys(config.vocab_size, "qwen2")
    add_keys(writer, {f"qwen35.{key}": value for key, value in sizes.items()} | tokenizer)
    for name, tensor in model.state_dict().items():
        whole, _, last = name.rpartition(".")
        _, _, layer, *inner = whole.split(".") if whole.startswith("model.layers.") else ("", "", "", whole)
        value, prefix = tensor.detach().float().numpy(), f"blk.{layer}." if layer else ""
        if last == "A_log":
            writer.add_tensor(f"{prefix}ssm_a", -np.exp(value))
        elif last == "dt_bias":
            writer.add_tensor(f"{prefix}ssm_dt.bias", value)
        else:
            usual = NAMES[".".join(inner)]
            value = value[:, 0] if usual == "ssm_conv1d" else value
            is_centred = usual.endswith("norm") and usual != "ssm_norm"
            writer.add_tensor(f"{prefix}{usual}.{last}", np.ascontiguousarray(value + 1 if is_centred else value))
    return finish(writer, path)
