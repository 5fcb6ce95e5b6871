"""A tiny random gpt-oss in the forms of its checkpoints: widened, as transformers saves it, and with MXFP4 experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from spec_kernels.four_bits_reference import E2M1
from tests.tiny_checkpoints import make_tiny_target

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 16,
    },
}


def make_tiny_gpt_oss(folder: Path, **overrides: Any) -> Any:
    """Write a random target, and return it as the transformers model. Its clamp acts, and its sinks are large."""
    family: Any = "gpt_oss"
    model = make_tiny_target(folder, family, **SIZES | overrides)
    for layer in model.model.layers:  # transformers 5.17 clamps at 7 whatever the checkpoint says
        layer.mlp.experts.gate_up_proj_bias.data *= 40
    model.save_pretrained(folder)
    return model


def pack_experts(folder: Path, model: Any) -> None:
    """Round the experts of the folder and of the model to MXFP4, and store them as openai/gpt-oss does."""
    generator = torch.Generator().manual_seed(9)
    stored = load_file(folder / "model.safetensors")
    weights = model.state_dict()
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = stored.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        exponents = torch.randint(121, 126, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
        weights[name].copy_(by_formula(blocks, exponents).transpose(1, 2))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})


def by_formula(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Widen by the standard, one value after another: (-1)^sign * number * 2^(exponent - 127)."""
    experts, rows, groups, _ = blocks.shape
    values = torch.empty(experts, rows, groups, 32)
    for half in (0, 1):
        codes = blocks >> 4 if half else blocks & 15
        numbers = torch.tensor(E2M1)[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0)
        values[..., half::2] = numbers * 2.0 ** (exponents.float() - 127).unsqueeze(-1)
    return values.flatten(2)
