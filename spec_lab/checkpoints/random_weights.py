"""Random weights for studies of speed, made on the device in seconds from a seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import torch

from spec_lab.checkpoints.block_checkpoint import block_tensor_shapes
from spec_lab.checkpoints.block_config import HEADS, BlockConfig, ConvSizes, HeadKind, MarkovForm, SlotReading, Slots
from spec_lab.checkpoints.checkpoint import run_dtype
from spec_lab.checkpoints.checkpoint_files import WHOLE_TENSORS, Slices, kept_part
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.eagle3_checkpoint import Eagle3Config, default_tap_layer_inputs, eagle3_tensor_shapes
from spec_lab.checkpoints.gemma4_assistant_checkpoint import TOKEN_ORDERING, AssistantConfig, assistant_tensor_shapes
from spec_lab.checkpoints.mtp_checkpoint import MtpConfig, mtp_tensor_shapes
from spec_lab.checkpoints.plan import LayerPlan, RopeConfig
from spec_lab.checkpoints.taps import default_taps
from spec_lab.core.errors import UserError

SCALE = 0.02
LARGEST_HEAD_DIM = 128
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
    plan = LayerPlan(
        *(first.num_heads, first.num_kv_heads, first.head_dim, first.rope, first.intermediate_size),
        o_bias=first.o_bias,
        mlp_bias=first.mlp_bias,
        latent=first.latent,
    )
    return Eagle3Config(
        layer=replace(target, family="llama", layers=(plan,)),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=draft_vocab_size or target.vocab_size,
        target_vocab_size=target.vocab_size,
        tap_layer_inputs=default_tap_layer_inputs(target.num_layers),
        norm_before_residual=False,
    )


def random_eagle3(
    target: ModelConfig,
    draft_vocab_size: int | None,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    parallel_layers: int | None = None,
) -> tuple[Eagle3Config, dict[str, torch.Tensor]]:
    """Make a head with random weights, which drafts with the target's embedding. The ids of its draft vocabulary are
    evenly spaced in the target's. With `parallel_layers` it is a P-EAGLE head of so many layers."""
    head = random_eagle3_config(target, draft_vocab_size)
    if parallel_layers is not None:
        more = head.layer.layers * (parallel_layers - 1)
        head = replace(head, more_layers=more, mask_token_id=target.vocab_size - 1)
    shapes = eagle3_tensor_shapes(head)
    del shapes["embed_tokens.weight"]
    tensors = random_tensors(shapes, dtype, device, seed)
    if head.draft_vocab_size < target.vocab_size:
        draft_ids = torch.arange(head.draft_vocab_size, device=device)
        tensors["d2t"] = draft_ids * (target.vocab_size // head.draft_vocab_size) - draft_ids
    return head, tensors


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
    shapes = mtp_tensor_shapes(layer)
    modules = [random_tensors(shapes, dtype, device, seed + module) for module in range(num_modules)]
    return MtpConfig(layer), modules


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


@dataclass(frozen=True, slots=True)
class BlockParts:
    """The parts of a block drafter that has no checkpoint.

    Attributes:
        head_rank: width of the head's factors.
        head_topk: number of tokens that a head with candidates scores in each slot.
    """

    head: HeadKind = HeadKind.none
    slots: Slots = Slots.mask_first
    conv: bool = False
    confidence: bool = False
    block_size: int = 8
    num_layers: int = 2
    head_rank: int = 256
    head_topk: int = 16
    markov_form: MarkovForm = MarkovForm.vanilla

    @classmethod
    def of(cls, knobs: object) -> BlockParts:
        """Return the parts that the knobs of the same names choose."""
        return cls(**{part.name: getattr(knobs, part.name) for part in fields(cls)})


def random_block_config(target: ModelConfig, parts: BlockParts) -> BlockConfig:
    """Return the config of a drafter whose body has plain layers of full attention, as wide as the target's."""
    group = next(size for size in (16, 8, 4, 2, 1) if target.hidden_size % size == 0)
    reads = target.hidden_size + (parts.head_rank if parts.head == HeadKind.markov else 0)
    layers = (_plain_layer(target),) * parts.num_layers
    rank, head = parts.head_rank, next(head for head in HEADS if head.kind == parts.head)
    sizes = {
        "rank": rank,
        "topk": min(parts.head_topk, target.vocab_size),
        "form": parts.markov_form,
        "state_size": 4 * rank,
        "hidden_size": 2 * rank,
        "factor_size": rank,
    }
    body = replace(target, family="qwen3", layers=layers, gemma4=None, max_dense_positions=None)
    return BlockConfig(
        body=body,
        block_size=parts.block_size,
        slots=SlotReading.of(parts.slots, parts.block_size, parts.head),
        taps=default_taps(target.num_layers, parts.num_layers),
        target_hidden_size=target.hidden_size,
        mask_token_id=target.vocab_size - 1,
        head=head(**{name: size for name, size in sizes.items() if name in head.keys}),
        draft_vocab_size=target.vocab_size,
        conv=ConvSizes(group_size=group) if parts.conv else None,
        confidence_reads=reads if parts.confidence else 0,
        embedding_scale=target.embedding_scale,
    )


def _plain_layer(target: ModelConfig) -> LayerPlan:
    """Return a layer of Qwen3, with the target's head sizes if a plain layer can have them."""
    first = next((plan for plan in target.layers if plan.delta_net is None), target.layers[0])
    num_heads, num_kv_heads, head_dim = first.num_heads, first.num_kv_heads, first.head_dim
    if first.latent is not None or first.delta_net is not None:
        head_dim = min(LARGEST_HEAD_DIM, target.hidden_size)
        num_heads = num_kv_heads = max(1, target.hidden_size // head_dim)
    has_mlp = first.experts is None and first.intermediate_size > 0
    return LayerPlan(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=RopeConfig(first.rope.theta, "none"),
        intermediate_size=first.intermediate_size if has_mlp else 3 * target.hidden_size,
        qk_norm=True,
    )


def random_block(
    target: ModelConfig, parts: BlockParts, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[BlockConfig, dict[str, torch.Tensor]]:
    """Make a block drafter with random weights, which drafts with the target's embedding and head."""
    config = random_block_config(target, parts)
    return config, random_tensors(block_tensor_shapes(config), dtype, device, seed)
