"""Block drafters with random weights, for studies of speed, for targets of any family. The body is as wide as the
target."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from spec_lab.checkpoints.block_checkpoint import block_tensor_shapes
from spec_lab.checkpoints.block_config import (
    BlockConfig,
    Causality,
    ConvSizes,
    SlotReading,
    Slots,
    default_taps,
)
from spec_lab.checkpoints.block_heads import (
    GruSizes,
    HeadKind,
    HeadSizes,
    LatticeSizes,
    MarkovForm,
    MarkovSizes,
    NoHead,
    SelectorSizes,
)
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.plan import LayerPlan, RopeConfig
from spec_lab.checkpoints.random_weights import random_tensors

LARGEST_HEAD_DIM = 128


@dataclass(frozen=True, slots=True)
class BlockParts:
    """The parts of a block drafter that has no checkpoint.

    Attributes:
        rank: width of the head's factors.
        topk: number of tokens that a head with candidates scores in each slot.
    """

    head: HeadKind = HeadKind.none
    slots: Slots = Slots.mask_first
    conv: bool = False
    confidence: bool = False
    block_size: int = 8
    num_layers: int = 2
    rank: int = 256
    topk: int = 16
    form: MarkovForm = MarkovForm.vanilla

    def head_sizes(self, target: ModelConfig) -> HeadSizes:
        """Return the sizes of the head, for a target's vocabulary."""
        rank, topk = self.rank, min(self.topk, target.vocab_size)
        sizes: dict[HeadKind, HeadSizes] = {
            HeadKind.none: NoHead(),
            HeadKind.markov: MarkovSizes(rank, self.form),
            HeadKind.gru: GruSizes(4 * rank, rank),
            HeadKind.selector: SelectorSizes(rank, topk),
            HeadKind.lattice: LatticeSizes(topk, 2 * rank, factor_size=rank),
        }
        return sizes[self.head]


def random_block_config(target: ModelConfig, parts: BlockParts) -> BlockConfig:
    """Return the config of a drafter whose body has plain layers of full attention, as wide as the target's."""
    group = next(size for size in (16, 8, 4, 2, 1) if target.hidden_size % size == 0)
    reads = target.hidden_size + (parts.rank if parts.head == HeadKind.markov else 0)
    layers = (_plain_layer(target),) * parts.num_layers
    body = replace(target, family="qwen3", layers=layers, gemma4=None, max_dense_positions=None)
    return BlockConfig(
        body=body,
        block_size=parts.block_size,
        slots=SlotReading.of(parts.slots, parts.block_size, parts.head),
        taps=default_taps(target.num_layers, parts.num_layers),
        target_hidden_size=target.hidden_size,
        mask_token_id=target.vocab_size - 1,
        head=parts.head_sizes(target),
        draft_vocab_size=target.vocab_size,
        causality=Causality.none,
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
