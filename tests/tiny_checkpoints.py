"""Helpers that write tiny random checkpoints in the Hugging Face layout into a folder of the test, and break them.

Every parameter is random, norms and biases too: with their usual ones and zeros a misread name would go unseen.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_lab.checkpoints.config import ModelConfig

Family = Literal["llama", "qwen2", "qwen3"]

TINY_SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def make_tiny_target(
    folder: Path, family: Family, *, seed: int = 0, max_shard_size: str = "5GB", **overrides: Any
) -> Any:
    """Write a random float32 target and return it as the transformers model, for reference.

    Defaults: 8 layers, GQA 4:2, and for llama and qwen3 head_dim 16 where hidden_size / heads is 8.

    Args:
        max_shard_size: "20KB" gives several shards and an index.
        overrides: keys of the transformers config, as `rope_parameters={...}`, `use_sliding_window=True`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    options = TINY_SIZES | ({} if family == "qwen2" else {"head_dim": 16}) | overrides
    torch.manual_seed(seed)
    auto_model: Any = AutoModelForCausalLM
    model = auto_model.from_config(AutoConfig.for_model(family, **options)).to(torch.float32).eval()
    randomize(model, seed)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Fill every parameter with `random_weight`, in the order of their names, and then the buffers that are saved."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.copy_(random_weight(name, tuple(parameter.shape), generator))
        for name, buffer in sorted(model.named_buffers()):
            if name in model.state_dict():
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Random values of a sensible size: norms around 1, biases around 0, embeddings of unit size, and matrices that
    keep the size of their input.
    """
    values = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return 0.1 * values if name.endswith("bias") else 1.0 + 0.2 * values
    return values if "embed_tokens" in name else values / math.sqrt(shape[1])


@contextmanager
def refused(*fragments: str | Path) -> Iterator[None]:
    """Check that the block raises a ValueError of one line that holds every fragment."""
    everything = "".join(f"(?=.*{re.escape(str(fragment))})" for fragment in fragments)
    with pytest.raises(ValueError, match=rf"\A{everything}.*\Z"):
        yield


def rewrite_config(folder: Path, drop: tuple[str, ...] = (), **changes: Any) -> None:
    """Change keys of a checkpoint's config.json in place."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in drop}, indent=2))


def rewrite_tensors(folder: Path, changes: Mapping[str, torch.Tensor], drop: tuple[str, ...] = ()) -> None:
    """Add, replace and drop tensors of a checkpoint of one file, in place."""
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    kept = {name: tensor.clone() for name, tensor in tensors.items() if name not in drop}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def use_hub_spelling(folder: Path) -> None:
    """Turn the config.json that transformers 5 wrote into the spelling of the files on the hub."""
    config = json.loads((folder / "config.json").read_text())
    rope = dict(config["rope_parameters"])
    theta = rope.pop("rope_theta")
    rope_scaling = None if rope["rope_type"] == "default" else rope
    rewrite_config(
        folder,
        drop=("rope_parameters", "dtype", "layer_types"),
        rope_theta=theta,
        rope_scaling=rope_scaling,
        torch_dtype=config["dtype"],
    )


def make_tiny_eagle3(
    folder: Path,
    target_config: ModelConfig,
    format: Literal["safeailab", "speculators"] = "safeailab",
    seed: int = 0,
    *,
    family: Family = "llama",
    draft_vocab_size: int | None = None,
    norm_before_residual: bool = False,
    embed_tokens: bool = False,
    **overrides: Any,
) -> dict[str, torch.Tensor]:
    """Write a random EAGLE-3 head for a target and return its tensors under SafeAILab's names.

    Args:
        format: the tensor names and the config layout.
        draft_vocab_size: None is three quarters of the target's; the target's own size leaves `d2t` and `t2d` out.
        embed_tokens: save an embedding of the head's own.
        overrides: further keys of config.json, top level; `norm_before_fc` and `fc_norm` add their tensors.
    """
    draft_vocab_size = draft_vocab_size or target_config.vocab_size * 3 // 4
    layer = {
        "model_type": family,
        "hidden_size": target_config.hidden_size,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": target_config.vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    config: dict[str, Any] = {"draft_vocab_size": draft_vocab_size, "norm_before_residual": norm_before_residual}
    if format == "speculators":
        config |= {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
            "target_hidden_size": None,
        }
    else:
        config = layer | config | {"architectures": ["LlamaForCausalLMEagle3"], "torch_dtype": "float32"}
    if target_config.num_layers == 4:  # of which three that no other head would read are not to be found
        config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
    tensors = _eagle3_tensors(target_config, draft_vocab_size, family == "qwen3", embed_tokens, seed)
    tensors |= _eagle31_norms(target_config.hidden_size, overrides, seed)
    layer_prefix = "layers.0." if format == "speculators" else "midlayer."
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name.replace("midlayer.", layer_prefix): tensor for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(config | overrides, indent=2))
    return tensors


def _eagle3_tensors(
    target: ModelConfig, draft_vocab_size: int, qk_norm: bool, embed_tokens: bool, seed: int
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = target.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (64, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (32, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (32, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, 64),
        "midlayer.mlp.gate_proj.weight": (40, hidden),
        "midlayer.mlp.up_proj.weight": (40, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, 40),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab_size, hidden),
    }
    if qk_norm:
        shapes |= {f"midlayer.self_attn.{name}.weight": (16,) for name in ("q_norm", "k_norm")}
    if embed_tokens:
        shapes["embed_tokens.weight"] = (target.vocab_size, hidden)
    tensors = {name: random_weight(name, shape, generator) for name, shape in shapes.items()}
    if draft_vocab_size < target.vocab_size:
        kept = torch.randperm(target.vocab_size, generator=generator)[:draft_vocab_size].sort().values
        tensors["d2t"] = kept - torch.arange(draft_vocab_size)
        tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, kept, True)
    return tensors


def _eagle31_norms(hidden: int, options: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """The norms of EAGLE-3.1, from a generator of their own, so that a head without them has the same other tensors."""
    shapes: dict[str, tuple[int, ...]] = {}
    if options.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * hidden,)
    if options.get("fc_norm"):
        shapes |= {f"fc_norm.{tap}.weight": (hidden,) for tap in range(3)}
    generator = torch.Generator().manual_seed(seed + 1)
    return {name: random_weight(name, shape, generator) for name, shape in shapes.items()}


def keep_first_layers(folder: Path, target: Path, num_layers: int) -> None:
    """Write the target's first layers, under its norm and head: a draft model that is right now and then."""
    config = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": num_layers}
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:num_layers]
    kept = {
        name: tensor
        for name, tensor in load_file(target / "model.safetensors").items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < num_layers
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
