"""The config.json of every family that is trained beside Qwen3, made from the knobs of its option."""

from __future__ import annotations

from typing import Any

from spec_lab.train.module_config import MAX_LENGTH
from spec_lab.train.target_config import PocketGemmaTrainingConfig, PocketHybridTrainingConfig, PocketMoeTrainingConfig

RMS_NORM_EPS = 1e-6
ROPE_THETA = 10_000.0
FULL_ROPE_THETA = 1_000_000.0
PARTIAL_ROTARY_FACTOR = 0.25
LOGIT_SOFTCAP = 30.0
CONV_KERNEL = 4
ROUTED_SCALING_FACTOR = 1.5


def common_keys(hidden_size: int, num_layers: int, vocab_size: int) -> dict[str, Any]:
    """Return the keys that all families write alike."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "rms_norm_eps": RMS_NORM_EPS,
        "max_position_embeddings": MAX_LENGTH,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "dtype": "bfloat16",
        "bos_token_id": None,
    }


def hybrid_keys(config: PocketHybridTrainingConfig, vocab_size: int) -> dict[str, Any]:
    """Return Qwen3.5's keys: delta nets, and after some of them a layer with gated attention, in which a quarter of
    a head turns."""
    return common_keys(config.hidden_size, config.num_layers, vocab_size) | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "linear_conv_kernel_dim": CONV_KERNEL,
        "linear_num_key_heads": config.num_key_heads,
        "linear_num_value_heads": config.num_value_heads,
        "linear_key_head_dim": config.key_head_dim,
        "linear_value_head_dim": config.value_head_dim,
        "layer_types": _every(config.full_attention_every, config.num_layers, "linear_attention"),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": ROPE_THETA,
            "partial_rotary_factor": PARTIAL_ROTARY_FACTOR,
        },
    }


def gemma_keys(config: PocketGemmaTrainingConfig, vocab_size: int) -> dict[str, Any]:
    """Return the keys of Gemma 4 as E2B: windows, KV shared by the last layers, an embedding for each layer."""
    return common_keys(config.hidden_size, config.num_layers, vocab_size) | {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "global_head_dim": config.full_head_dim,
        "attention_k_eq_v": False,
        "sliding_window": config.window,
        "layer_types": _every(config.full_attention_every, config.num_layers, "sliding_attention"),
        "num_kv_shared_layers": config.num_shared_layers,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": config.per_layer_width,
        "vocab_size_per_layer_input": vocab_size,
        "final_logit_softcapping": LOGIT_SOFTCAP,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": ROPE_THETA},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": FULL_ROPE_THETA,
                "partial_rotary_factor": PARTIAL_ROTARY_FACTOR,
            },
        },
    }


def moe_keys(config: PocketMoeTrainingConfig, vocab_size: int) -> dict[str, Any]:
    """Return DeepSeek-V3's keys: latent attention, a dense layer, and behind it layers of experts with a shared one."""
    return common_keys(config.hidden_size, config.num_layers, vocab_size) | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": config.expert_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": None,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "rope_interleave": True,
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.num_chosen,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": ROUTED_SCALING_FACTOR,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
    }


def _every(interval: int, num_layers: int, other: str) -> list[str]:
    """Return the kinds of layers, of which each `interval`-th and the last have full attention."""
    is_full = [(index + 1) % interval == 0 or index + 1 == num_layers for index in range(num_layers)]
    return ["full_attention" if full else other for full in is_full]
