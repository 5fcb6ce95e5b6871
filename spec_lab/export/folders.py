"""A folder as engines load it: `config.json`, and `model.safetensors` or an index of several files."""

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

MOST_FILE_BYTES = 15 * 10**6
"""The most bytes of a head's tensors in a file, so that it can go into a repository. A larger tensor gets a file of its
own."""


def in_bfloat16(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return floating-point tensors in bfloat16, and integer and boolean ones unchanged, all on the CPU."""
    return {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).detach().contiguous().cpu()
        for name, tensor in tensors.items()
    }


def as_narrow_as_it_is(tensor: Tensor) -> Tensor:
    """Return a floating-point tensor in 16 bits if that is exact; any other tensor is unchanged."""
    narrow = (tensor.to(dtype) for dtype in (torch.bfloat16, torch.float16))
    is_floating = tensor.is_floating_point()
    return next((it for it in narrow if is_floating and torch.equal(it.to(tensor.dtype), tensor)), tensor)


def save_folder(
    tensors: Mapping[str, Tensor],
    config: dict[str, Any],
    folder: Path,
    like: Mapping[str, Tensor] | None = None,
    most_bytes: int | None = None,
) -> None:
    """Save tensors in as many files as they need, and config.json.

    Args:
        like: tensors without data of the same shapes and types, if `tensors` are read on access.
        most_bytes: in a file; `MOST_FILE_BYTES` by default.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, Tensor] = dict(tensors if like is None else like)
    split = split_torch_state_dict_into_shards(sizes, max_shard_size=most_bytes or MOST_FILE_BYTES)
    for file, names in split.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def save_drafter(tensors: Mapping[str, Tensor], config: dict[str, Any], folder: Path) -> None:
    """Save a trained drafter `in_bfloat16`."""
    save_folder(in_bfloat16(tensors), config, folder)


def load_drafter(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Load tensors as saved, and the config."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    files = sorted(folder.glob("model*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}, config
