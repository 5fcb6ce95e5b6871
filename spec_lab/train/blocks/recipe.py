"""`drafter=dflash` and its presets: trains body and head on the target's own texts, and saves them in z-lab's
layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from spec_lab.checkpoints.block_checkpoint import block_tensor_shapes, load_block, tensors_of
from spec_lab.checkpoints.block_config import BlockConfig, Slots, default_taps
from spec_lab.checkpoints.block_heads import HeadKind, MarkovForm
from spec_lab.checkpoints.block_layouts import ZLAB
from spec_lab.checkpoints.block_writing import write_block
from spec_lab.checkpoints.random_blocks import BlockParts, random_block_config
from spec_lab.checkpoints.random_weights import random_tensors
from spec_lab.checkpoints.taps import Tap
from spec_lab.train.block_config import BlockTrainingConfig
from spec_lab.train.blocks.drafter import TrainableBlock
from spec_lab.train.blocks.slot_recipe import SlotRecipe
from spec_lab.train.blocks.training import block_loss_words
from spec_lab.train.drafter import DrafterDescription
from spec_lab.train.eagle3_recipe import CountedTexts
from spec_lab.train.frozen_target import FrozenTarget

ZEROS = ("markov_w2.weight", "embed_proj.2.weight", "successor_codebook", "kernel_projection.weight")
"""Weights that are initialised to zero, so that a new head or convolution does not change a trained body's output."""
TABLES = ("markov_w1.weight", "predecessor_codebook")


@dataclass(frozen=True, slots=True)
class BlockRecipe(SlotRecipe):
    """Trains a block drafter."""

    config: BlockTrainingConfig

    def build(
        self, target: FrozenTarget, texts: CountedTexts, seed: int, always_drafted: Sequence[int] = ()
    ) -> TrainableBlock:
        """Make a drafter that is untrained, or begins with those weights of the drafter in `body` that fit it."""
        config, body = self._begun(target, texts, [*target.config.eos_token_ids, *always_drafted])
        shapes = block_tensor_shapes(config)
        fresh = random_tensors(shapes, torch.float32, torch.device("cpu"), seed)
        fresh["norm.weight"] = target.final_norm_weight.float().cpu()
        tensors = {name: begun_with(name, tensor) for name, tensor in fresh.items()}
        tensors |= tensors_of(config, body)
        return TrainableBlock(config, tensors, target)

    def taps(self, target: FrozenTarget) -> tuple[Tap, ...]:
        """Return its taps: `default_taps`, or those of the drafter whose body it starts from."""
        if self.config.body is not None:
            return load_block(Path(self.config.body), target.config, torch.float32, "cpu", "drafter.body")[0].taps
        return default_taps(target.config.num_layers, self.config.num_layers)

    def save(self, drafter: TrainableBlock, target: FrozenTarget, folder: Path) -> None:
        """Write it in z-lab's layout."""
        tensors = {name: narrow(tensor.detach()) for name, tensor in drafter.tensors().items()}
        write_block(folder, drafter.config, tensors, target.config.num_layers, ZLAB)

    def load(self, folder: Path, target: FrozenTarget) -> TrainableBlock:
        """Read what `save` wrote, its weights held in float32."""
        config, tensors = load_block(folder, target.config, torch.float32, "cpu")
        return TrainableBlock(config, tensors, target).to(target.device)

    def describe(self, folder: Path) -> DrafterDescription:
        """Describe the drafter for its card; see `DrafterRecipe`."""
        knobs = self.config
        begun = "" if knobs.body is None else f" It was begun with the weights of {Path(knobs.body).name}."
        return DrafterDescription(
            kind=f"a block drafter (`drafter={knobs.name}`)",
            reading=f"""Its body has {knobs.num_layers} layers; a block is the pending token and {knobs.block_size - 1}
mask tokens. `head={knobs.head}`, `slots={knobs.slots}`, `conv={str(knobs.conv).lower()}`. Embedding and output head
are the target's where the file has none.{begun}""",
            loss=block_loss_words(knobs),
        )

    def _begun(
        self, target: FrozenTarget, texts: CountedTexts, always_drafted: list[int]
    ) -> tuple[BlockConfig, Mapping[str, Tensor]]:
        """Return the sizes, and the weights to start from."""
        knobs, model = self.config, target.config
        parts = BlockParts(
            head=HeadKind(knobs.head.value),
            slots=Slots(knobs.slots.value),
            conv=knobs.conv,
            confidence=knobs.confidence,
            block_size=knobs.block_size,
            num_layers=knobs.num_layers,
            rank=knobs.head_rank,
            topk=knobs.head_topk,
            form=MarkovForm(knobs.markov_form.value),
        )
        config = random_block_config(model, parts)
        if knobs.body is not None:
            found, tensors = load_block(Path(knobs.body), model, torch.float32, "cpu", "drafter.body")
            own = {name: getattr(config, name) for name in ("head", "slots", "conv", "confidence_reads")}
            return replace(found, **own), tensors
        config = replace(config, mask_token_id=self.mask_token(texts, model.vocab_size))
        kept = self.vocabulary(target, texts, always_drafted)
        return (replace(config, draft_vocab_size=len(kept["d2t"])) if kept else config), kept


def begun_with(name: str, tensor: Tensor) -> Tensor:
    """Return the initial value of a weight, given a random draw for it."""
    if name.endswith(ZEROS):
        return torch.zeros_like(tensor)
    if name.endswith("base_kernel"):  # the convolution starts as the identity
        return torch.zeros_like(tensor).index_fill_(1, torch.zeros(1, dtype=torch.long), 1.0)
    if name.endswith(TABLES):
        return tensor / tensor.std() / tensor.shape[1] ** 0.5
    return tensor


def narrow(tensor: Tensor) -> Tensor:
    """Return weights in bf16, and other tensors unchanged."""
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
