"""A trained drafter on disk: `config.json` and `model.safetensors`, as engines load them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def save_drafter(tensors: Mapping[str, Tensor], config: dict[str, Any], folder: Path) -> None:
    """Save floating-point tensors in bf16, integer and boolean ones as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    saved = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).contiguous().cpu()
        for name, tensor in tensors.items()
    }
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    save_config(config, folder)


def save_config(config: dict[str, Any], folder: Path) -> None:
    """Write config.json."""
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_drafter(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Load tensors as saved, and the config."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return load_file(folder / "model.safetensors"), config
