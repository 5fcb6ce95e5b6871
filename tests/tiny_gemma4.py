"""Helpers that write tiny random Gemma 4 targets and assistants of the released kinds, as transformers saves them and
as the hub has them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_checkpoints import random_weight, rewrite_config

SLIDING, FULL = "sliding_attention", "full_attention"
VOCAB, WINDOW, POSITIONS = 96, 8, 256
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
    "final_logit_softcapping": 3.0,
    "max_position_embeddings": POSITIONS,
    "eos_token_id": 1,
}
_KEYS_ARE_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
KINDS: dict[str, dict[str, Any]] = {
    "31b": _KEYS_ARE_VALUES | {"layer_types": [SLIDING, SLIDING, FULL] * 2},
    "e2b": {
        "num_hidden_layers": 8,
        "layer_types": [SLIDING, FULL] * 4,
        "num_kv_shared_layers": 4,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
    },
    "e4b": {
        "num_hidden_layers": 9,
        "layer_types": [SLIDING, SLIDING, FULL] * 3,
        "num_kv_shared_layers": 4,
        "hidden_size_per_layer_input": 8,
    },
    "26b": _KEYS_ARE_VALUES
    | {
        "layer_types": [SLIDING, SLIDING, FULL] * 2,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
}


def make_tiny_gemma4(folder: Path, kind: str, seed: int = 0, **text: Any) -> Any:
    """Write a random float32 text model of one of `KINDS`, and return it as the transformers model."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    model = Gemma4ForCausalLM(Gemma4TextConfig(**TEXT | KINDS[kind] | text)).eval()
    randomize_all(model, seed)
    model.save_pretrained(folder)
    return model


def randomize_all(model: torch.nn.Module, seed: int) -> None:
    """Fill parameters and buffers that are saved, which here are scalars and scales that begin at 1."""
    generator = torch.Generator().manual_seed(seed)
    everything = dict(model.named_parameters())
    everything |= {name: buffer for name, buffer in model.named_buffers() if name.endswith("layer_scalar")}
    with torch.no_grad():
        for name, tensor in sorted(everything.items()):
            values = random_weight(name, tuple(tensor.shape), generator)
            # The attention scale is 1: a norm around 1 would make every softmax one-hot, and hide what it should show.
            of_heads = tensor.shape[0] ** -0.25 if "q_norm" in name or "k_norm" in name else 1.0
            of_experts = tensor.shape[1] ** 0.5 / tensor.shape[2] ** 0.5 if tensor.dim() == 3 else 1.0
            # Logits of the size of the cap, not far past it, where all of them would be equal.
            of_embeddings = 0.1 if "embed_tokens" in name else 1.0
            tensor.copy_(values * of_heads * of_experts * of_embeddings)


def use_hub_spelling(folder: Path, model: Any, dead: bool = True) -> None:
    """Turn a saved text model into the text part of one that also sees and hears, as the hub has them.

    `dead` adds the tensors that layers with another's KV do not use, and a tensor of each other sense.
    """
    config = json.loads((folder / "config.json").read_text())
    full = config.pop("per_layer_config")[str(config["layer_types"].index(FULL))]
    text = {key: value for key, value in config.items() if key not in ("architectures", "dtype")}
    text["model_type"] = "gemma4_text"
    text["global_head_dim"] = full["head_dim"]
    text["num_global_key_value_heads"] = full.get("num_key_value_heads")
    outer = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "dtype": config["dtype"],
        "tie_word_embeddings": True,
        "text_config": text,
        "vision_config": None,
        "audio_config": None,
    }
    (folder / "config.json").write_text(json.dumps(outer, indent=2))
    tensors = load_file(folder / "model.safetensors")
    nested = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    if dead:
        for index, mode in enumerate(model.config.kv_sharing_modes):
            if mode == "reuse":
                prefix = f"model.language_model.layers.{index}.self_attn."
                nested |= {f"{prefix}{name}_proj.weight": torch.ones(3, 3) for name in "kv"}
                nested[f"{prefix}k_norm.weight"] = torch.ones(3)
        senses = ("vision_tower.patch.weight", "embed_vision.projection.weight", "audio_tower.conv.weight")
        nested |= {f"model.{name}": torch.ones(3) for name in senses}
    save_file(nested, folder / "model.safetensors", metadata={"format": "pt"})


def make_tiny_gemma4_assistant(
    folder: Path, kind: str, seed: int = 5, text: Mapping[str, Any] | None = None, **outer: Any
) -> Any:
    """Write a random assistant for the target of a kind, and return it as the transformers model.

    `text` has further keys of its text_config.
    """
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

    of_target = {key: value for key, value in KINDS[kind].items() if key in _KEYS_ARE_VALUES}
    layer_types = [SLIDING, SLIDING, FULL]
    of_assistants = {
        "hidden_size": 24,
        "num_hidden_layers": len(layer_types),
        "layer_types": layer_types,
        "num_kv_shared_layers": len(layer_types),
        "vocab_size_per_layer_input": 0,
        "final_logit_softcapping": None,
    }
    text_config = Gemma4TextConfig(**TEXT | of_target | of_assistants | dict(text or {}))
    config = Gemma4AssistantConfig(text_config=text_config, backbone_hidden_size=TEXT["hidden_size"], **outer)
    assistant = Gemma4AssistantForCausalLM(config).eval()
    randomize_all(assistant, seed)
    if outer.get("use_ordered_embeddings"):
        generator = torch.Generator().manual_seed(seed)
        assistant.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB, generator=generator))
    assistant.save_pretrained(folder)
    return assistant


@contextmanager
def assistants_build() -> Iterator[None]:
    """Mend two faults of transformers 5.23.0: its check that a shared layer has an owner in the same model refuses
    every assistant, and a target whose layers all own their KV hands none of it over.
    """
    from transformers import Gemma4TextConfig

    if "kv_sharing_modes" not in vars(Gemma4TextConfig):
        yield
        return

    def modes(config: Any) -> list[str | None]:
        layer_types, first = config.layer_types, config.num_hidden_layers - config.num_kv_shared_layers
        found: list[str | None] = [None if i < first else "reuse" for i in range(len(layer_types))]
        for layer_type in set(layer_types[:first]):
            found[max(i for i in range(first) if layer_types[i] == layer_type)] = "store"
        return found

    patch = pytest.MonkeyPatch()
    patch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(modes))
    yield
    patch.undo()


def rewrite_text(folder: Path, drop: tuple[str, ...] = (), **changes: Any) -> None:
    """Change keys of a config.json's text_config in place."""
    text = json.loads((folder / "config.json").read_text())["text_config"] | changes
    rewrite_config(folder, text_config={key: value for key, value in text.items() if key not in drop})
