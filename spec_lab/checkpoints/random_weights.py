"""Random weights for studies of speed, made on the device in seconds from a seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from spec_lab.checkpoints.checkpoint import run_dtype
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.eagle3_checkpoint import eagle3_tensor_shapes
from spec_lab.checkpoints.eagle3_config import Eagle3Config
from spec_lab.checkpoints.gemma4_assistant_checkpoint import TOKEN_ORDERING, assistant_tensor_shapes
from spec_lab.checkpoints.gemma4_assistant_config import AssistantConfig
from spec_lab.checkpoints.mtp_checkpoint import MtpConfig, mtp_tensor_shapes
from spec_lab.checkpoints.slices import WHOLE_TENSORS, Slices, kept_part
from spec_lab.core.errors import UserError
from spec_lab.core.types import NormSide

SCALE = 0.02
# Weights of norms, and the factors by which Gemma 4 multiplies layer outputs, router inputs and experts.
ONES = ("norm.weight", "norm_1.weight", "norm_2.weight", "layer_scalar", "router.scale", "router.per_expert_scale")


def random_tensors(
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    slices: Slices = WHOLE_TENSORS,
    in_float32: Callable[[str], bool] = lambda name: False,
) -> dict[str, torch.Tensor]:
    """Make a tensor for each name: ones for names that end as in `ONES`, zeros for `.bias`, else normal with deviation
    `SCALE`.

    Every process draws whole tensors and keeps its part, so that the model does not depend on the number of processes.
    `in_float32` returns whether the tensor of a name is float32 whatever `dtype` is.
    """
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        own_dtype = torch.float32 if in_float32(name) else run_dtype(name, dtype)
        if name.endswith(ONES):
            tensor = torch.ones(shape, dtype=own_dtype, device=device)
        elif name.endswith(".bias"):
            tensor = torch.zeros(shape, dtype=own_dtype, device=device)
        else:
            tensor = torch.empty(shape, dtype=own_dtype, device=device).normal_(0, SCALE, generator=generator)
        tensors[name] = kept_part(slices, name, tensor)
    return tensors


def random_eagle3_config(target: ModelConfig, draft_vocab_size: int | None) -> Eagle3Config:
    """Return the config of a head with the target's embedding and one layer of the target's sizes.

    The layer has no window, experts, gate, or norms of queries and keys. Latent attention is kept if the target has it.
    """
    first = target.layers[0]
    plan = replace(
        first,
        qk_norm=False,
        wide_qk_norm=False,
        norms_outputs=False,
        qkv_bias=False,
        window=None,
        attention_gate=False,
        delta_net=None,
        experts=None,
        float32_norms=False,
        sinks=False,
    )
    return Eagle3Config(
        layer=replace(target, family="llama", layers=(plan,)),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=draft_vocab_size or target.vocab_size,
        target_vocab_size=target.vocab_size,
        tap_layer_inputs=None,
        norm_before_residual=False,
    )


def random_eagle3(
    target: ModelConfig, draft_vocab_size: int | None, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[Eagle3Config, dict[str, torch.Tensor]]:
    """Make a head with random weights. The ids of its draft vocabulary are evenly spaced in the target's."""
    head, tensors = _random_head(random_eagle3_config(target, draft_vocab_size), dtype, device, seed)
    if head.draft_vocab_size < target.vocab_size:
        draft_ids = torch.arange(head.draft_vocab_size, device=device)
        tensors["d2t"] = draft_ids * (target.vocab_size // head.draft_vocab_size) - draft_ids
    return head, tensors


def random_p_eagle(
    target: ModelConfig, num_layers: int, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[Eagle3Config, dict[str, torch.Tensor]]:
    """Make a P-EAGLE head with random weights. Further layers have the sizes of the first."""
    first = random_eagle3_config(target, None)
    more = first.layer.layers * (num_layers - 1)
    return _random_head(replace(first, more_layers=more, mask_token_id=target.vocab_size - 1), dtype, device, seed)


def _random_head(
    head: Eagle3Config, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[Eagle3Config, dict[str, torch.Tensor]]:
    shapes = eagle3_tensor_shapes(head)
    del shapes["embed_tokens.weight"]  # the target's serves
    return head, random_tensors(shapes, dtype, device, seed)


def random_mtp(
    target: ModelConfig, num_modules: int, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[MtpConfig, list[dict[str, torch.Tensor]]]:
    """Make modules with random weights. Their layer has the sizes of the target's last attention layer, without a
    window.

    Raises:
        UserError: a Gemma 4 target, since modules have no layers like its own.
    """
    if target.gemma4 is not None:
        raise UserError("drafter.weights=random: a Gemma 4 target has no MTP module; use drafter=frozen_kv")
    last = next(plan for plan in reversed(target.layers) if plan.delta_net is None)
    layer = replace(target, layers=(replace(last, window=None, kv_owner=None),))
    mtp = MtpConfig(layer, num_modules, NormSide.POST_NORM, NormSide.POST_NORM)
    shapes = mtp_tensor_shapes(layer)
    return mtp, [random_tensors(shapes, dtype, device, seed + module) for module in range(num_modules)]


def random_assistant(
    config: AssistantConfig, dtype: torch.dtype, device: torch.device, seed: int
) -> dict[str, torch.Tensor]:
    """Make an assistant with random weights. If its head has C clusters, cluster c has the tokens c, c + C, c + 2C, and
    so on."""
    tensors = random_tensors(assistant_tensor_shapes(config), dtype, device, seed)
    if config.centroids is not None:
        tokens = torch.arange(config.target.vocab_size, device=device)
        tensors[TOKEN_ORDERING] = tokens.view(-1, config.centroids.num_centroids).t().flatten()
    return tensors
