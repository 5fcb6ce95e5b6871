"""Helpers for models with latent attention: tiny random ones of transformers' own classes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from spec_lab.checkpoints.config import ModelConfig
from tests.tiny_checkpoints import random_weight, randomize

LATENT_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# No two sizes alike, so that none can stand in for another.
SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 14,
    "v_head_dim": 12,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,  # transformers has it in two of the norms whatever stands here
    "rope_parameters": YARN,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_latent_target(folder: Path, model_type: str = "deepseek_v3", *, seed: int = 0, **overrides: Any) -> Any:
    """Write a random float32 target with latent attention, and return it as the transformers model.

    Args:
        model_type: as transformers calls it.
        overrides: keys of its config, over `SIZES`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    auto_model: Any = AutoModelForCausalLM
    torch.manual_seed(seed)
    model = auto_model.from_config(AutoConfig.for_model(model_type, **SIZES | overrides)).to(torch.float32).eval()
    randomize(model, seed)
    model.save_pretrained(folder)
    return model


def make_latent_eagle3(folder: Path, target: ModelConfig, seed: int = 0, **overrides: Any) -> dict[str, torch.Tensor]:
    """Write a random EAGLE-3 head with latent attention, under the names and with the config of those for Kimi-K2.5;
    return its tensors under SafeAILab's names.

    What its config says of experts, KV heads and the width of a head means nothing.
    """
    hidden, sizes = target.hidden_size, {key: SIZES[key] for key in LATENT_KEYS} | overrides
    config: dict[str, Any] = {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        "hidden_size": hidden,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 0,
        "moe_layer_freq": 1,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "rms_norm_eps": 0.01,
        "rope_theta": 300.0,
        "rope_scaling": {"type": "yarn", **{key: YARN[key] for key in YARN if not key.startswith("rope")}},
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        **sizes,
    }
    tensors = _latent_eagle3_tensors(config, seed)
    folder.mkdir(parents=True, exist_ok=True)
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def _latent_eagle3_tensors(config: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["q_lora_rank"]
    latents, rotated, plain, values = (config[key] for key in LATENT_KEYS[1:])
    attention: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa": (latents + rotated, 2 * hidden),
        "kv_a_layernorm": (latents,),
        "kv_b_proj": (heads * (plain + values), latents),
        "o_proj": (hidden, heads * values),
    }
    if rank is None:
        attention["q_proj"] = (heads * (plain + rotated), 2 * hidden)
    else:
        attention |= {"q_a_proj": (rank, 2 * hidden), "q_a_layernorm": (rank,)}
        attention["q_b_proj"] = (heads * (plain + rotated), rank)
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (hidden, 3 * hidden),
        "midlayer.input_layernorm": (hidden,),
        "midlayer.hidden_norm": (hidden,),
        "midlayer.post_attention_layernorm": (hidden,),
        **{f"midlayer.self_attn.{name}": shape for name, shape in attention.items()},
        "midlayer.mlp.gate_proj": (40, hidden),
        "midlayer.mlp.up_proj": (40, hidden),
        "midlayer.mlp.down_proj": (hidden, 40),
        "norm": (hidden,),
        "lm_head": (config["vocab_size"], hidden),
    }
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{tap}": (hidden,) for tap in range(3)}
    generator = torch.Generator().manual_seed(seed)
    return {f"{name}.weight": random_weight(name, shape, generator) for name, shape in shapes.items()}
