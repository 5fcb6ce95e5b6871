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
from spec_lab.train.reading import reading

MOST_FILE_BYTES = 15 * 10**6
"""The most bytes of tensors in a file, so that it can go into a repository. A larger tensor gets a file of its own."""
WEIGHTS = "model*.safetensors"


def save_drafter(tensors: Mapping[str, Tensor], config: dict[str, Any], folder: Path) -> None:
    """Save floating-point tensors in bf16, and integer and boolean ones unchanged."""
    folder.mkdir(parents=True, exist_ok=True)
    saved = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).detach().contiguous().cpu()
        for name, tensor in tensors.items()
    }
    save_weights(saved, folder)
    save_config(config, folder)


def save_weights(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write tensors in as many files as they need."""
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=MOST_FILE_BYTES)
    for file, names in split.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def save_config(config: dict[str, Any], folder: Path) -> None:
    """Write config.json."""
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_drafter(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Load tensors as saved, and the config."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return load_weights(folder), config


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Load the tensors of all files.

    Raises:
        UserError: there are none, or one cannot be read.
    """
    with reading(folder):
        files = sorted(folder.glob(WEIGHTS))
        if not files:
            raise FileNotFoundError(WEIGHTS)
        return {name: tensor for file in files for name, tensor in load_file(file).items()}


def num_weight_bytes(folder: Path) -> int:
    """Count the bytes of all files of weights."""
    return sum(file.stat().st_size for file in folder.glob(WEIGHTS))
