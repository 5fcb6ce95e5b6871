"""Helpers that write tiny random Qwen3.5 and Qwen3-Next targets, in which delta nets and full attention take turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.tiny_checkpoints import TINY_SIZES, randomize, rewrite_config, rewrite_tensors

VOCAB = 64
SIZES: dict[str, Any] = TINY_SIZES | {
    "vocab_size": VOCAB,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {}),
    "qwen3_5_with_vision": ("Qwen3_5ForConditionalGeneration", "Qwen3_5Config", {}),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", EXPERTS),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", EXPERTS | {"mlp_only_layers": [1]}),
}
"""Of each kind transformers' class, that of its config, and options besides `SIZES`."""


def make_tiny_hybrid(folder: Path, kind: str = "qwen3_5", seed: int = 0, **overrides: Any) -> Any:
    """Write a random float32 target of one of `KINDS`, and return it as the transformers model."""
    import transformers

    model_class, config_class, options = KINDS[kind]
    sizes = SIZES | options | overrides
    if kind == "qwen3_5_with_vision":
        sizes = {"text_config": sizes, "vision_config": VISION}
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**sizes))
    model = model.to(torch.float32).eval()
    randomize(model, seed)
    center_norms(model)
    model.save_pretrained(folder)
    return model


def center_norms(model: torch.nn.Module) -> None:
    """Move the weights of norms that multiply by 1 + weight from around 1 to around 0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight") and "linear_attn.norm" not in name:
                parameter -= 1


NEXTN_NAMES = {
    "layers.0.eh_proj.": "mtp.fc.",
    "layers.0.enorm.": "mtp.pre_fc_norm_embedding.",
    "layers.0.hnorm.": "mtp.pre_fc_norm_hidden.",
    "layers.0.post_norm.": "mtp.norm.",
    "layers.0.mtp_block.": "mtp.layers.0.",
}
"""Where transformers' module keeps what checkpoints have below `mtp.`."""


def make_tiny_nextn(folder: Path, kind: str = "qwen3_5", seed: int = 5, **overrides: Any) -> Any:
    """Write a target of one of `KINDS` with its NextN module, and return transformers' module."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

    make_tiny_hybrid(folder, kind, **overrides)
    target: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    target.config.num_mtp_layers, target.config.mtp_layer_types = 1, ["full_attention"]
    module = MtpModel(target, 1).eval()
    randomize(module.layers, seed)
    center_norms(module.layers)
    tensors = {}
    for name, tensor in module.state_dict().items():
        for ours, theirs in NEXTN_NAMES.items():
            if name.startswith(ours):
                tensors[theirs + name.removeprefix(ours)] = tensor.detach().clone()
    rewrite_tensors(folder, tensors)
    if kind == "qwen3_5_with_vision":
        text = json.loads((folder / "config.json").read_text())["text_config"]
        rewrite_config(folder, text_config=text | {"mtp_num_hidden_layers": 1})
    elif kind != "qwen3_next":  # whose files name no count
        rewrite_config(folder, mtp_num_hidden_layers=1)
    return module
