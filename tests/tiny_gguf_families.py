"""Helpers that write a tiny Qwen3.5, with experts and an MTP module or without, or a tiny gpt-oss as a GGUF file, as
llama.cpp's converters lay them out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from safetensors.numpy import load_file

from tests.tiny_gguf import add_keys, finish, tokenizer_keys
from tests.tiny_gpt_oss import SIZES

QWEN35: dict[str, Any] = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "linear_value_head_dim": 8}
"""llama.cpp has one head size for keys and values."""
QWEN35_MOE = QWEN35 | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
WHOLE_BORDER = float(np.float32(math.exp(SIZES["head_dim"] * math.log(16 / (2 * math.pi)) / 1.9999)))
GPT_OSS: dict[str, Any] = {
    "vocab_size": 300,
    "swiglu_limit": 7.0,
    "rope_parameters": SIZES["rope_parameters"] | {"rope_theta": WHOLE_BORDER},
}
"""llama.cpp knows the bound of every gpt-oss, which no file says. It rounds YaRN's borders to whole channels, so here
they are next to whole ones."""
MODULES = {
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
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "fc": "nextn.eh_proj",
    "pre_fc_norm_embedding": "nextn.enorm",
    "pre_fc_norm_hidden": "nextn.hnorm",
    "norm": "nextn.shared_head_norm",
}
TENSORS = {
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "mlp.experts.gate_up_proj_bias": "ffn_gate_up_exps.bias",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
}


def write_family(
    path: Path,
    model: Any,
    folder: Path | None = None,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    fused: bool = False,
) -> Path:
    """Write a transformers model, its matrices in `kind`.

    Args:
        folder: where its MTP module is, or its experts in MXFP4.
        fused: whether gates and ups of experts are one tensor.
    """
    config, weights = model.config, {name: it.detach().float().numpy() for name, it in model.state_dict().items()}
    stored = {} if folder is None else load_file(folder / "model.safetensors")
    module = {name: it for name, it in stored.items() if name.startswith("mtp.")}
    packed = {
        name.removesuffix("_blocks"): packed_again(it, stored[name.replace("_blocks", "_scales")])
        for name, it in stored.items()
        if name.endswith("_blocks")
    }
    architecture, keys = {
        "qwen3_5_text": ("qwen35", qwen35_keys),
        "qwen3_5_moe_text": ("qwen35moe", qwen35_keys),
        "gpt_oss": ("gpt-oss", gpt_oss_keys),
    }[config.model_type]
    writer = GGUFWriter(path, architecture)
    sizes = common_keys(config, len(module) > 0) | keys(config)
    cutting = "gpt-4o" if architecture == "gpt-oss" else "qwen35"
    add_keys(
        writer, {f"{architecture}.{key}": it for key, it in sizes.items()} | tokenizer_keys(config.vocab_size, cutting)
    )
    for name, value in (weights | module).items():
        inner, prefix = placed(name, config.num_hidden_layers)
        for theirs, each in named(inner, value, packed.get(name), config, fused):
            stored_as = (
                kind
                if each.ndim > 1 and each.shape[-1] % 32 == 0 and "conv1d" not in theirs
                else GGMLQuantizationType.F32
            )
            if each.dtype == np.uint8:
                writer.add_tensor(prefix + theirs, each, raw_dtype=GGMLQuantizationType.MXFP4)
            else:
                writer.add_tensor(prefix + theirs, quantize(np.ascontiguousarray(each), stored_as), raw_dtype=stored_as)
    return finish(writer, path)


def placed(name: str, num_layers: int) -> tuple[str, str]:
    """The name within its block, and the block's prefix; a module is the block behind the last layer."""
    if name.startswith("mtp."):
        return name.removeprefix("mtp.").removeprefix("layers.0."), f"blk.{num_layers}."
    if name.startswith("model.layers."):
        layer, inner = name.removeprefix("model.layers.").split(".", 1)
        return inner, f"blk.{layer}."
    return name, ""


def named(
    inner: str, value: np.ndarray, packed: np.ndarray | None, config: Any, fused: bool
) -> list[tuple[str, np.ndarray]]:
    """The tensors of the file that are made of one of the folder, with their names within a block."""
    module, _, last = inner.rpartition(".")
    theirs = TENSORS.get(inner) or f"{MODULES[module]}.{last}"
    if config.model_type == "gpt_oss":
        if inner in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
            value = value.swapaxes(1, 2) if packed is None else packed
        if "gate_up" in theirs:
            return [
                (theirs.replace("gate_up", "gate"), value[:, ::2]),
                (theirs.replace("gate_up", "up"), value[:, 1::2]),
            ]
        return [(theirs, value)]
    value = tiled(inner, value, config)
    if "norm" in inner and inner != "linear_attn.norm.weight":
        value = value + 1
    if theirs == "ffn_gate_up_exps.weight" and not fused:
        gate, up = np.split(value, 2, axis=1)
        return [("ffn_gate_exps.weight", gate), ("ffn_up_exps.weight", up)]
    return [(theirs, value)]


def tiled(inner: str, value: np.ndarray, config: Any) -> np.ndarray:
    """Let the value heads of a delta net take turns over its key heads; some tensors take another form as well."""
    keys, values, size = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    order = np.arange(values).reshape(keys, values // keys).T.flatten()
    rows = (order[:, None] * size + np.arange(size)).flatten()
    behind = 2 * keys * config.linear_key_head_dim
    match inner.removeprefix("linear_attn."):
        case "in_proj_qkv.weight" | "conv1d.weight":
            value = np.concatenate((value[:behind], value[behind:][rows]))
            return value[:, 0] if "conv1d" in inner else value
        case "in_proj_z.weight":
            return value[rows]
        case "out_proj.weight":
            return value[:, rows]
        case "in_proj_a.weight" | "in_proj_b.weight" | "dt_bias":
            return value[order]
        case "A_log":
            return -np.exp(value[order])
        case "mlp.shared_expert_gate.weight":
            return value[0]
    return value


def packed_again(blocks: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """The bytes of MXFP4 in a GGUF file: an exponent, then in each of 16 bytes one of the first 16 numbers and one of
    the last. In a folder they are neighbours."""
    codes = np.stack((blocks & 15, blocks >> 4), axis=-1).reshape(*blocks.shape[:-1], 32)
    halves = codes[..., :16] | codes[..., 16:] << 4
    return np.concatenate((exponents[..., None], halves), axis=-1).reshape(*blocks.shape[:2], -1)


def common_keys(config: Any, has_module: bool) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers + has_module,
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        **({"nextn_predict_layers": 1} if has_module else {}),
    }


def qwen35_keys(config: Any) -> dict[str, Any]:
    rotated = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
    experts = (
        {}
        if config.model_type == "qwen3_5_text"
        else {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }
    )
    return experts | {
        "rope.dimension_count": rotated,
        "rope.dimension_sections": [rotated // 2 - 2, 1, 1, 0],
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.group_count": config.linear_num_key_heads,
        "full_attention_interval": 4,
    }


def gpt_oss_keys(config: Any) -> Mapping[str, Any]:
    rope = config.rope_parameters
    return {
        "attention.sliding_window": config.sliding_window,
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.intermediate_size,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }
