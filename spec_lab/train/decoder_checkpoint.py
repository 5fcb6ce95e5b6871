"""Trained decoders on disk, as their families' checkpoints are, so that engines and transformers load them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spec_lab.checkpoints.checkpoint import run_dtype


def as_saved(tensors: Mapping[str, Tensor], zero_centred: bool) -> dict[str, Tensor]:
    """Return tensors of a `TrainableDecoder`, or of a module of its layers, in the form of checkpoints.

    Experts stand one by one. `zero_centred`: norms multiply by 1 + what is stored (Qwen3.5), but for that of a delta
    net's heads.
    """
    saved: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            saved |= _one_by_one(name.removesuffix("gate_up_proj"), ("gate_proj", "up_proj"), tensor.chunk(2, dim=1))
        elif name.endswith("experts.down_proj"):
            saved |= _one_by_one(name.removesuffix("down_proj"), ("down_proj",), (tensor,))
        elif zero_centred and name.endswith("norm.weight") and "linear_attn" not in name:
            saved[name] = tensor - 1
        else:
            saved[name] = tensor
    return saved


def in_saved_dtype(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in bf16, but for those that the runtime keeps in float32 whatever a run's dtype."""
    return {name: tensor.to(run_dtype(name, torch.bfloat16)).contiguous().cpu() for name, tensor in tensors.items()}


def from_saved(saved: Mapping[str, Tensor], zero_centred: bool) -> dict[str, Tensor]:
    """Undoe `as_saved`, in float32."""
    tensors: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in saved.items():
        tensor = tensor.float()
        before, _, behind = name.partition(".experts.")
        if behind:
            number, kind, _ = behind.split(".")
            experts.setdefault(f"{before}.experts.{kind}", {})[int(number)] = tensor
        elif zero_centred and name.endswith("norm.weight") and "linear_attn" not in name:
            tensors[name] = tensor + 1
        else:
            tensors[name] = tensor
    stacked = {name: torch.stack([parts[i] for i in range(len(parts))]) for name, parts in experts.items()}
    for name in [name for name in stacked if name.endswith("gate_proj")]:
        prefix = name.removesuffix("gate_proj")
        tensors[f"{prefix}gate_up_proj"] = torch.cat([stacked[name], stacked[f"{prefix}up_proj"]], dim=1)
        tensors[f"{prefix}down_proj"] = stacked[f"{prefix}down_proj"]
    return tensors


def _one_by_one(prefix: str, kinds: tuple[str, ...], stacks: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return {
        f"{prefix}{expert}.{kind}.weight": weight
        for kind, stack in zip(kinds, stacks, strict=True)
        for expert, weight in enumerate(stack.unbind())
    }
