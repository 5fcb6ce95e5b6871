"""Helpers that write tiny random Qwen3.5 and Qwen3-Next targets, in which delta nets and full attention take turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.tiny_checkpoints import TINY_SIZES, randomize

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
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
KINDS = ("qwen3_5", "qwen3_5_with_vision", "qwen3_next")


def make_tiny_hybrid(folder: Path, kind: str = "qwen3_5", seed: int = 0, **overrides: Any) -> Any:
    """Write a random float32 target of one of `KINDS`, and return it as the transformers model."""
    import transformers as hf

    sizes = SIZES | overrides
    torch.manual_seed(seed)
    model: Any
    if kind == "qwen3_5":
        model = hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**sizes))
    elif kind == "qwen3_5_with_vision":
        model = hf.Qwen3_5ForConditionalGeneration(hf.Qwen3_5Config(text_config=sizes, vision_config=VISION))
    else:
        dense = {"mlp_only_layers": list(range(sizes["num_hidden_layers"]))}
        model = hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**(dense | sizes)))
    model = model.to(torch.float32).eval()
    randomize(model, seed)
    model.save_pretrained(folder)
    return model
