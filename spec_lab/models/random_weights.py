"""Weights nobody trained, for studies of speed: made on the device in seconds, from a seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from spec_lab.models.config import ModelConfig
from spec_lab.models.eagle3_checkpoint import Eagle3Config, eagle3_tensor_shapes

SCALE = 0.02


def random_tensors(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device, seed: int
) -> dict[str, torch.Tensor]:
    """A tensor for each name: ones for the weights of norms, zeros for biases, else normal with deviation `SCALE`."""
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        if name.endswith("norm.weight"):
            tensors[name] = torch.ones(shape, dtype=dtype, device=device)
        elif name.endswith(".bias"):
            tensors[name] = torch.zeros(shape, dtype=dtype, device=device)
        else:
            tensors[name] = torch.empty(shape, dtype=dtype, device=device).normal_(0, SCALE, generator=generator)
    return tensors


def random_eagle3(
    target: ModelConfig, draft_vocab_size: int | None, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[Eagle3Config, dict[str, torch.Tensor]]:
    """A head of one Llama layer as wide as the target's, that drafts every so-and-so-manyth id of its vocabulary."""
    draft_size = draft_vocab_size or target.vocab_size
    head = Eagle3Config(
        layer=replace(target, family="llama", num_layers=1, qk_norm=False, qkv_bias=False, layer_windows=(None,)),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=draft_size,
        target_vocab_size=target.vocab_size,
        tap_layer_inputs=None,
        norm_before_residual=False,
    )
    shapes = eagle3_tensor_shapes(head)
    del shapes["embed_tokens.weight"]  # the target's serves
    tensors = random_tensors(shapes, dtype, device, seed)
    if draft_size < target.vocab_size:
        draft_ids = torch.arange(draft_size, device=device)
        tensors["d2t"] = draft_ids * (target.vocab_size // draft_size) - draft_ids
    return head, tensors
