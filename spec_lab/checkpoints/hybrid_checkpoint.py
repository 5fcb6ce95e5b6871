"""The tensors of Qwen3.5 and Qwen3-Next, which differ from Llama's in name, order or meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from spec_lab.checkpoints.checkpoint import without_mtp
from spec_lab.checkpoints.checkpoint_files import StoredTensor
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.delta_net_checkpoint import ungrouped

TEXT_PREFIX = "model.language_model."
BESIDE_THE_TEXT = ("model.visual.",)


def hybrid_tensors(stored: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """Pick the decoder's tensors from a checkpoint, which may have a vision tower, and convert them.

    The result has the names and the row order of Qwen3.5's text model. Its norms multiply by their weight w, not by 1 +
    w.
    """
    result = {
        _text_name(name): tensor for name, tensor in without_mtp(stored).items() if not name.startswith(BESIDE_THE_TEXT)
    }
    for index, plan in enumerate(config.layers):
        if plan.delta_net is not None:
            result = ungrouped(result, f"model.layers.{index}.linear_attn.", plan.delta_net)
    return {name: zero_centred(tensor) if counts_from_one(name) else tensor for name, tensor in result.items()}


def counts_from_one(name: str) -> bool:
    """Return whether a tensor is the weight w of a norm that multiplies by 1 + w, as all but the delta nets' norms
    do."""
    return name.endswith("norm.weight") and not name.endswith(".linear_attn.norm.weight")


def zero_centred(tensor: StoredTensor) -> StoredTensor:
    """Replace the weight w of a norm by 1 + w, in float32, since bfloat16 would round it by up to 0.4 %."""
    return replace(tensor, form=_one_plus, in_float32=True)


def _one_plus(weight: torch.Tensor) -> torch.Tensor:
    return 1 + weight.float()


def _text_name(name: str) -> str:
    return "model." + name.removeprefix(TEXT_PREFIX) if name.startswith(TEXT_PREFIX) else name
