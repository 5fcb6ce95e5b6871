"""Helpers that quantise the matrices of a tiny target's folder, in the layouts of compressed-tensors, AWQ and GPTQ."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.tiny_checkpoints import rewrite_config

Parts = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]
"""From the name of a module and its matrix to the parts that a file has instead."""


def quantise(folder: Path, options: Mapping[str, Any], parts_of: Parts) -> None:
    """Replace each matrix of the layers by the parts that `parts_of` makes of it, and say how in config.json."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module.endswith("_proj"):
            tensors |= {f"{module}.{part}": value.contiguous() for part, value in parts_of(module, tensor).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    rewrite_config(folder, quantization_config=dict(options))


def compressed(scheme: Any, form: str, dtype: torch.dtype) -> Parts:
    """Return what quantises a matrix by the library's own functions, with scales in `dtype`.

    Args:
        scheme: a `QuantizationScheme` of compressed_tensors.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weights = scheme.weights
    compressor = BaseCompressor.get_value_from_registry(form)

    def parts_of(module: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        wide = weight.to(dtype)
        rows = {"tensor": wide.reshape(1, -1), "channel": wide}.get(weights.strategy)
        if weights.strategy == "block":
            height, width = weights.block_structure
            blocks = wide.unflatten(0, (-1, height)).unflatten(2, (-1, width))
            low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
        else:
            rows = wide.unflatten(1, (-1, weights.group_size)) if rows is None else rows
            low, high = rows.amin(-1, keepdim=rows.ndim == 2), rows.amax(-1, keepdim=rows.ndim == 2)
        state: dict[str, torch.Tensor] = {"weight": wide}
        if weights.strategy == "tensor_group":
            state["weight_global_scale"] = generate_gparam(wide.min(), wide.max()).view(1)
        scale, zero = calculate_qparams(low, high, weights, state.get("weight_global_scale"))
        made: dict[str, torch.Tensor] = compressor.compress(
            state | {"weight_scale": scale, "weight_zero_point": zero}, scheme
        )
        return {part: value.detach().clone() for part, value in made.items()}

    return parts_of


def words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack numbers [rows, n] below 2^bits into int32, the first in the lowest bits, one by one."""
    each = 32 // bits
    packed = torch.zeros(len(numbers), numbers.shape[1] // each, dtype=torch.int64)
    for index in range(numbers.shape[1]):
        packed[:, index // each] |= numbers[:, index].long() << (bits * (index % each))
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def config_of(scheme: Any, form: str, **more: Any) -> dict[str, Any]:
    """Return the `quantization_config` of a file in which one scheme applies to all matrices of layers."""
    group = json.loads(scheme.model_dump_json())
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        **more,
    }


def split(folder: Path) -> None:
    """Write every second tensor of a folder into another file."""
    tensors = load_file(folder / "model.safetensors")
    files = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        kept = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        save_file(kept, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
