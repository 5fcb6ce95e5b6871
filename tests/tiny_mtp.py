"""Helpers that write tiny random MTP modules under the names of each family. They are made of transformers' own layers,
which then are the reference: every row is recomputed for every draft, without a cache.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from spec_lab.checkpoints.config import ModelConfig
from spec_lab.core.types import NormSide
from tests.lab import Reference
from tests.tiny_checkpoints import randomize
from tests.tiny_latent import LATENT_KEYS, SIZES, YARN

DEEPSEEK_NAMES = {
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "projection": "eh_proj",
    "final_norm": "shared_head.norm",
}
MIMO_NAMES = {
    "embedding_norm": "token_layernorm",
    "hidden_norm": "hidden_layernorm",
    "projection": "input_proj",
    "final_norm": "final_layernorm",
}
QWEN_NAMES = {
    "embedding_norm": "pre_fc_norm_embedding",
    "hidden_norm": "pre_fc_norm_hidden",
    "projection": "fc",
    "final_norm": "norm",
}


@dataclass(frozen=True)
class TinyFamily:
    """How transformers calls a family's classes, and where its checkpoints keep a module; {layer} counts from 8."""

    package: str
    classes: str
    architecture: str
    module_prefix: str = "model.layers.{layer}."
    layer_prefix: str = "model.layers.{layer}."
    names: Mapping[str, str] = field(default_factory=lambda: DEEPSEEK_NAMES)
    options: Mapping[str, Any] = field(default_factory=dict)
    count_key: str = "num_nextn_predict_layers"
    config_section: str | None = None
    hidden_first: bool = False

    def tensor_name(self, name: str, module: int) -> str:
        """The name in the file of a parameter of `TinyMtp`."""
        numbers = {"module": module, "layer": 8 + module}
        part, _, rest = name.partition(".")
        if part == "layer":
            return self.layer_prefix.format(**numbers) + rest
        return f"{self.module_prefix.format(**numbers)}{self.names[part]}.{rest}"


FAMILIES = {
    "ours": TinyFamily("qwen3", "Qwen3", "Qwen3ForCausalLM", options={"num_attention_heads": 8, "head_dim": 8}),
    "deepseek_names": TinyFamily("llama", "Llama", "DeepseekV3ForCausalLM"),
    "deepseek": TinyFamily(
        "deepseek_v3",
        "DeepseekV3",
        "DeepseekV3ForCausalLM",
        options={
            **{key: SIZES[key] for key in LATENT_KEYS},
            "num_key_value_heads": 4,
            "head_dim": SIZES["qk_rope_head_dim"],  # transformers takes it for the width of the rope
            "first_k_dense_replace": 100,
            "rms_norm_eps": 1e-6,
            "rope_parameters": YARN,
        },
    ),
    "glm": TinyFamily(
        "glm4_moe",
        "Glm4Moe",
        "Glm4MoeForCausalLM",
        options={
            "attention_bias": True,
            "use_qk_norm": True,
            "first_k_dense_replace": 100,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
        },
    ),
    "mimo": TinyFamily(
        "qwen2",
        "Qwen2",
        "MiMoForCausalLM",
        "model.mtp_layers.{module}.",
        "model.mtp_layers.{module}.",
        MIMO_NAMES,
        options={"head_dim": 8},
        hidden_first=True,
    ),
    "qwen3_5": TinyFamily(
        "qwen3_5",
        "Qwen3_5",
        "Qwen3_5ForConditionalGeneration",
        "mtp.",
        "mtp.layers.{module}.",
        QWEN_NAMES,
        options={
            "layer_types": ["full_attention"] * 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.25},
        },
        count_key="mtp_num_hidden_layers",
        config_section="text_config",
    ),
}


class TinyMtp(nn.Module):
    """One MTP module made of transformers' layers."""

    def __init__(self, family: TinyFamily, config: Any, modeling: Any) -> None:
        super().__init__()
        norm, classes = getattr(modeling, f"{family.classes}RMSNorm"), family.classes
        self.embedding_norm, self.hidden_norm, self.final_norm = (
            norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)
        )
        self.projection = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = getattr(modeling, f"{classes}DecoderLayer")(config, 0)
        text = "Text" if family.config_section else ""
        self.__dict__["rotary"] = getattr(modeling, f"{classes}{text}RotaryEmbedding")(config)
        self.__dict__["hidden_first"] = family.hidden_first

    @torch.inference_mode()
    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """From [rows, hidden_size] embeddings of t[p+1] and hidden states h[p], p from 0 on, to what the final norm
        gets.
        """
        parts = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
        stream = self.projection(torch.cat(parts[::-1] if self.hidden_first else parts, dim=-1))[None]
        mask = torch.full((len(hidden), len(hidden)), float("-inf")).triu(1)[None, None]
        angles = self.rotary(stream, torch.arange(len(hidden))[None])
        out: torch.Tensor = self.layer(stream, attention_mask=mask, position_embeddings=angles)
        return out[0]


def make_tiny_mtp(
    folder: Path, family_name: str, target: ModelConfig, num_modules: int = 1, seed: int = 3, **overrides: Any
) -> list[TinyMtp]:
    """Write modules for a target, into its own folder or one without a trunk, and return them.

    Args:
        overrides: keys of config.json, of the text model's section where there is one.
    """
    family = FAMILIES[family_name]
    modeling_name = f"transformers.models.{family.package}.modeling_{family.package}"
    modeling = pytest.importorskip(modeling_name, reason="this transformers lacks the family")
    config = _config(family, target, modeling, in_targets_folder=(folder / "model.safetensors").exists())
    modules = [TinyMtp(family, config, modeling) for _ in range(num_modules)]
    tensors: dict[str, torch.Tensor] = {}
    for number, module in enumerate(modules):
        randomize(module, seed + number)
        _center_norms(module, modeling, family)
        tensors |= {
            family.tensor_name(name, number): tensor.detach().clone() for name, tensor in module.state_dict().items()
        }
    if family.module_prefix == "mtp.":
        _share_all_but_the_layer(modules, tensors, family)
    _write(folder, tensors, _config_json(family, config, num_modules, overrides))
    return modules


def _config(family: TinyFamily, target: ModelConfig, modeling: Any, in_targets_folder: bool) -> Any:
    """The modules' own sizes, or the target's where both have one config.json."""
    plan = target.layers[0]
    targets = {
        "intermediate_size": plan.intermediate_size,
        "num_attention_heads": plan.num_heads,
        "num_key_value_heads": plan.num_kv_heads,
        "head_dim": plan.head_dim,
    }
    options = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "intermediate_size": 40,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        **family.options,
        **(targets if in_targets_folder else {}),
    }
    text = "Text" if family.config_section else ""
    config = getattr(modeling, f"{family.classes}{text}Config")(**options)
    config._attn_implementation = "eager"
    return config


def _center_norms(module: TinyMtp, modeling: Any, family: TinyFamily) -> None:
    """Move the weights of norms to around 0 where the family adds 1 to them."""
    if family.classes == "Qwen3_5":
        with torch.no_grad():
            for part in module.modules():
                if isinstance(part, modeling.Qwen3_5RMSNorm):
                    part.weight -= 1


def _share_all_but_the_layer(modules: list[TinyMtp], tensors: dict[str, torch.Tensor], family: TinyFamily) -> None:
    """Qwen's modules have one projection and one set of norms around their layers."""
    for name, tensor in modules[0].state_dict().items():
        if not name.startswith("layer."):
            tensors[family.tensor_name(name, 0)] = tensor.detach().clone()
            for module in modules[1:]:
                module.state_dict()[name].copy_(tensor)


def _config_json(family: TinyFamily, config: Any, num_modules: int, overrides: Mapping[str, Any]) -> dict[str, Any]:
    names = {"architectures": [family.architecture]}
    content = config.to_dict() | {family.count_key: num_modules} | dict(overrides)
    return names | {family.config_section: content} if family.config_section else content | names


def _write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Write the modules, beside the trunk's tensors and over its config.json keys where the folder is a target's."""
    folder.mkdir(parents=True, exist_ok=True)
    weights, config_file = folder / "model.safetensors", folder / "config.json"
    if weights.exists():
        tensors = {**load_file(weights), **tensors}
        # The target's own sizes stand; only what names the modules is added.
        added = {key: config[key] for key in ("architectures", "num_nextn_predict_layers")}
        config = json.loads(config_file.read_text()) | added
    save_file(tensors, weights, metadata={"format": "pt"})
    config_file.write_text(json.dumps(config, indent=2))


@dataclass
class SlowMtp:
    """A reference that drafts with one module, reused: the whole chain is recomputed for every draft."""

    module: TinyMtp
    reference: Reference
    target_hidden: NormSide = NormSide.POST_NORM
    recycled_hidden: NormSide = NormSide.POST_NORM

    @torch.inference_mode()
    def draft(self, text: list[int], num_draft_tokens: int) -> tuple[list[int], list[torch.Tensor]]:
        """Return the drafts after `text` and the logits of each. Row p pairs token t[p+1] with the hidden state of
        position p.
        """
        hidden, tokens = target_hidden_states(self.reference, text, self.target_hidden)[:-1], text[1:]
        drafts, all_logits = [], []
        for _ in range(num_draft_tokens):
            out = self.module(self.reference.model.model.embed_tokens.weight[tokens], hidden)[-1]
            normed = self.module.final_norm(out)
            all_logits.append(self.reference.model.lm_head(normed))
            drafts.append(int(all_logits[-1].argmax()))
            recycled = normed if self.recycled_hidden is NormSide.POST_NORM else out
            tokens, hidden = [*tokens, drafts[-1]], torch.cat((hidden, recycled[None]))
        return drafts, all_logits


@torch.inference_mode()
def target_hidden_states(reference: Reference, text: list[int], side: NormSide) -> torch.Tensor:
    """The target's hidden states [rows, hidden_size] on one side of its final norm."""
    seen: dict[NormSide, torch.Tensor] = {}

    def keep(norm: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        seen[NormSide.PRE_NORM], seen[NormSide.POST_NORM] = inputs[0][0], output[0]

    handle = reference.model.model.norm.register_forward_hook(keep)
    reference.model(torch.tensor([text]))
    handle.remove()
    return seen[side]
