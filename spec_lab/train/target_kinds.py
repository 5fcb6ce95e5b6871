"""The kinds of targets that are trained here: config.json from the knobs of their options, and the preparation of
models."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from spec_lab.train.experts import balance_experts
from spec_lab.train.module_config import MAX_LENGTH
from spec_lab.train.target_config import (
    PocketGemmaTrainingConfig,
    PocketHybridTrainingConfig,
    PocketMoeTrainingConfig,
    PocketTrainingConfig,
)

RMS_NORM_EPS = 1e-6
ROPE_THETA = 10_000.0
FULL_ROPE_THETA = 1_000_000.0
PARTIAL_ROTARY_FACTOR = 0.25
LOGIT_SOFTCAP = 30.0
CONV_KERNEL = 4
ROUTED_SCALING_FACTOR = 1.5
SHORTEST_STEP, LONGEST_STEP = 1e-3, 1e-1
"""The range of initial time steps of delta nets' heads, as in Mamba-2: some states decay within tens of tokens, some
within thousands. With transformers' own initial steps of about 1.3, most states decay within a few tokens."""


def common_keys(hidden_size: int, num_layers: int, vocab_size: int) -> dict[str, Any]:
    """Return the keys that all families share."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "rms_norm_eps": RMS_NORM_EPS,
        "max_position_embeddings": MAX_LENGTH,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": None,
    }


def qwen3_keys(config: PocketTrainingConfig, vocab_size: int) -> dict[str, Any]:
    """Return Qwen3's keys."""
    return common_keys(config.hidden_size, config.num_layers, vocab_size) | {
        "model_type": "qwen3",
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
    }


def hybrid_keys(config: PocketHybridTrainingConfig, vocab_size: int) -> dict[str, Any]:
    """Return Qwen3.5's keys: delta nets, and between some of them a layer with gated attention, in which a quarter of
    each head is rotated."""
    return common_keys(config.hidden_size, config.num_layers, vocab_size) | {
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
    """Return Gemma 4's keys, like E2B: windows, last layers that share KV, and an embedding for each layer."""
    return common_keys(config.hidden_size, config.num_layers, vocab_size) | {
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
    """Return DeepSeek-V3's keys: latent attention, a dense layer, then layers of experts with a shared expert."""
    return common_keys(config.hidden_size, config.num_layers, vocab_size) | {
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
        "num_nextn_predict_layers": 0,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
    }


def _every(interval: int, num_layers: int, other: str) -> list[str]:
    """Return the kinds of layers; every `interval`-th and the last have full attention, the rest are `other`."""
    is_full = [(index + 1) % interval == 0 or index + 1 == num_layers for index in range(num_layers)]
    return ["full_attention" if full else other for full in is_full]


def qwen3_layers(config: dict[str, Any]) -> str:
    """Describe the layers of a Qwen3 for its card."""
    return f"""feed-forward {config["intermediate_size"]}, {config["num_attention_heads"]} query and
{config["num_key_value_heads"]} key-value heads of {config["head_dim"]}"""


def hybrid_layers(config: dict[str, Any]) -> str:
    """Describe the layers of a Qwen3.5 for its card."""
    num_full = config["layer_types"].count("full_attention")
    return f"""of which {num_full} have gated attention ({config["num_attention_heads"]} query and
{config["num_key_value_heads"]} key-value heads of {config["head_dim"]}) and the others a gated delta net in its place
({config["linear_num_key_heads"]} key heads of {config["linear_key_head_dim"]}, {config["linear_num_value_heads"]} value
heads of {config["linear_value_head_dim"]}), which keeps a state; feed-forward {config["intermediate_size"]}"""


def gemma_layers(config: dict[str, Any]) -> str:
    """Describe the layers of a Gemma 4 for its card."""
    num_full = config["layer_types"].count("full_attention")
    return f"""of which {num_full} see all and the others a window of {config["sliding_window"]} keys (heads of
{config["head_dim"]}), with {config["num_attention_heads"]} query and {config["num_key_value_heads"]} key-value heads;
the last {config["num_kv_shared_layers"]} layers read the keys and values of earlier ones; feed-forward
{config["intermediate_size"]}, an embedding of {config["hidden_size_per_layer_input"]} for each layer, capped logits"""


def moe_layers(config: dict[str, Any]) -> str:
    """Describe the layers of a DeepSeek-V3 for its card."""
    return f"""latent attention ({config["num_attention_heads"]} heads over rows of {config["kv_lora_rank"]} +
{config["qk_rope_head_dim"]} numbers), the first layer dense (feed-forward {config["intermediate_size"]}) and the others
with {config["n_routed_experts"]} experts of width {config["moe_intermediate_size"]}, of which a token takes
{config["num_experts_per_tok"]}, beside one that all take; the experts' load was balanced only by the router's bias"""


@torch.no_grad()
def spread_time_steps(model: Any) -> None:
    """Initialise the heads of delta nets with different decay rates."""
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            net, num_heads = layer.linear_attn, len(layer.linear_attn.A_log)
            net.A_log.copy_(torch.linspace(1.0, 16.0, num_heads).log())
            steps = torch.logspace(math.log10(LONGEST_STEP), math.log10(SHORTEST_STEP), num_heads)
            net.dt_bias.copy_(steps.expm1().log())  # its softplus is the step


@torch.no_grad()
def soften_queries(model: Any) -> None:
    """Initialise attention with scores of about 1, since Gemma 4 does not divide them by the root of `head_dim`."""
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.fill_(layer.self_attn.head_dim**-0.5)


def leave(model: nn.Module) -> None:
    """Keep transformers' initialisation."""


@dataclass(frozen=True, slots=True)
class TargetKind:
    """The specifics of one kind of target.

    Attributes:
        keys: makes its config.json from the knobs and the vocabulary size.
        architecture: the name of its architecture, for the card.
        layers: describes its layers for the card, given its config.json.
        prepare: prepares transformers' model for training, such as by another initialisation.
        in_16_bits: whether products in training are bfloat16; None for the device's default.
    """

    keys: Callable[[Any, int], dict[str, Any]]
    architecture: str
    layers: Callable[[dict[str, Any]], str]
    prepare: Callable[[Any], None] = leave
    in_16_bits: bool | None = None


KINDS = {
    "pocket": TargetKind(qwen3_keys, "Qwen3", qwen3_layers),
    # In a delta rule, products depend on earlier products, for which bfloat16 is too coarse.
    "pocket_hybrid": TargetKind(hybrid_keys, "Qwen3.5", hybrid_layers, spread_time_steps, in_16_bits=False),
    "pocket_gemma": TargetKind(gemma_keys, "Gemma 4", gemma_layers, soften_queries),
    "pocket_moe": TargetKind(moe_keys, "DeepSeek-V3", moe_layers, balance_experts),
}
"""The kinds, by the option of `target`."""
