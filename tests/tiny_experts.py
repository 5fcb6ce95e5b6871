"""Helpers for tiny random targets with experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.tiny_checkpoints import make_tiny_target, randomize, rewrite_tensors

SIZES: dict[str, Any] = {"num_hidden_layers": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 3}
GLM: dict[str, Any] = SIZES | {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
}
QWEN: dict[str, Any] = SIZES | {"num_experts": 8, "norm_topk_prob": True}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4_moe": ("glm4_moe", GLM),
    "glm4_moe_biases_and_norms": (
        "glm4_moe",
        GLM | {"attention_bias": True, "use_qk_norm": True, "n_group": 1, "topk_group": 1, "n_shared_experts": 2},
    ),
    "qwen3_moe": ("qwen3_moe", QWEN),
    "qwen3_moe_some_dense": (
        "qwen3_moe",
        QWEN | {"norm_topk_prob": False, "mlp_only_layers": [3], "decoder_sparse_step": 2, "attention_bias": True},
    ),
}


def make_tiny_experts(folder: Path, kind: str, **overrides: Any) -> Any:
    """Write a random target with experts, and return it as the transformers model."""
    family, options = KINDS[kind]
    any_family: Any = family
    return make_tiny_target(folder, any_family, **options | {"head_dim": 16} | overrides)


def make_tiny_nextn(folder: Path, num_modules: int = 1, seed: int = 3, **overrides: Any) -> tuple[Any, Any]:
    """Write a GLM-4.5 with NextN modules behind its layers; return target and modules as transformers has them."""
    model = make_tiny_experts(folder, "glm4_moe", num_nextn_predict_layers=num_modules, **overrides)
    return model, add_nextn(folder, model, num_modules, seed)


def add_nextn(folder: Path, model: Any, num_modules: int = 1, seed: int = 3) -> Any:
    """Write random NextN modules, with experts, behind the layers of a target; return them as transformers has them.

    Their experts are stored together, the target's one by one, as both are found.
    """
    from transformers.modeling_layers import MtpModel

    modules = MtpModel(model, num_modules).eval()
    own = torch.nn.ModuleList(modules.layers)
    randomize(own, seed)
    tensors = {}
    for name, tensor in own.state_dict().items():
        number, _, rest = name.partition(".")
        rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        tensors[f"model.layers.{model.config.num_hidden_layers + int(number)}.{rest}"] = tensor
    rewrite_tensors(folder, tensors)
    return modules
