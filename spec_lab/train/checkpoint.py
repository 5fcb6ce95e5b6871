"""A trained drafter on disk, as engines load it: `config.json`, and `model.safetensors` or an index of several."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from torch import Tensor

from spec_lab.checkpoints.checkpoint_files import INDEX_FILE
from spec_lab.checkpoints.plan import RopeConfig

MOST_FILE_BYTES = 15 * 10**6
"""The most bytes of tensors in a file, so that it can go into a repository. A larger tensor gets a file of its own."""


def in_bfloat16(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return floating-point tensors in bfloat16, and integer and boolean ones unchanged, all on the CPU."""
    return {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).detach().contiguous().cpu()
        for name, tensor in tensors.items()
    }


def save_drafter(tensors: Mapping[str, Tensor], config: dict[str, Any], folder: Path) -> None:
    """Save tensors `in_bfloat16` in as many files as they need, and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    saved = in_bfloat16(tensors)
    split = split_torch_state_dict_into_shards(saved, max_shard_size=MOST_FILE_BYTES)
    for file, names in split.filename_to_tensors.items():
        save_file({name: saved[name] for name in names}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_drafter(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Load tensors as saved, and the config."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    files = sorted(folder.glob("model*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}, config


def rope_keys(rope: RopeConfig) -> dict[str, object]:
    """Return the keys of config.json for the RoPE of a head's layer."""
    if rope.scaling == "none":
        return {"rope_theta": rope.theta}
    scaling: dict[str, object] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        }
    return {"rope_theta": rope.theta, "rope_scaling": scaling}
