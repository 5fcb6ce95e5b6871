"""Helpers for models with latent attention: tiny random ones of transformers' own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.tiny_checkpoints import randomize

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
