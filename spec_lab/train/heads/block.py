"""`drafter=dflash` and its presets: a body and the head that relates its slots, stored in z-lab's layout.

A preset is only a choice of parts: `dspark`, `domino`, `dflash2`, `lilicorr`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_lab.checkpoints.block_checkpoint import block_tensor_shapes, load_block, tensors_of
from spec_lab.checkpoints.block_config import BlockConfig, HeadKind, MarkovForm, Slots
from spec_lab.checkpoints.block_layouts import ZLAB
from spec_lab.checkpoints.random_weights import BlockParts, random_block_config, random_tensors
from spec_lab.checkpoints.taps import Tap, default_taps
from spec_lab.export.block_json import block_json
from spec_lab.export.folders import save_drafter
from spec_lab.models.blocks.body import BlockBody, BlockPlace
from spec_lab.models.blocks.heads import HeadParts
from spec_lab.models.blocks.model import SlotLogits, build_confidence, build_head, drafted_rows
from spec_lab.models.linear import DenseLinear
from spec_lab.train.anchored import (
    Anchored,
    AnchoredAttention,
    AnchoredCache,
    AnchoredModule,
    AnchoredRows,
    Joining,
)
from spec_lab.train.data import Texts
from spec_lab.train.head import draft_vocabulary, vocabulary_maps
from spec_lab.train.target import FrozenTarget

ZEROS = ("markov_w2.weight", "embed_proj.2.weight", "successor_codebook", "kernel_projection.weight")
"""Weights that begin at zero, so that a new head or convolution does not change a trained body's output."""
TABLES = ("markov_w1.weight", "predecessor_codebook")


class BlockModule(AnchoredModule):
    """A body and the head that relates its slots. If the tensors have no embedding or no output head, the target's is
    used, without being trained."""

    def __init__(self, config: BlockConfig, tensors: Mapping[str, Tensor], target: FrozenTarget) -> None:
        super().__init__(config.slots.most_drafts, tensors, target)
        self.config = config
        self._frozen_head = drafted_rows(self.target_head, self.token_map)

    def slots(self, rows: AnchoredRows, tapped: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        cache: Any = AnchoredCache(config.body.num_layers)
        attention: Any = AnchoredAttention(rows)
        longest = rows.tokens.shape[1] + config.block_size
        rotary = self.rotary(config.body.layers[0], longest)
        body = BlockBody(config, self.tensors(), self.embedding, attention, max_positions=longest, rotary=rotary)
        lengths, none = rows.lengths(), rows.anchors[:0]
        context = body.write(tapped.flatten(0, 1), cache, attention.build(rows.positions, none, none, longest))
        place = BlockPlace(lengths, none, longest)
        hidden = body.slots(rows.pending(), place, cache, config.slots.first_row, self.num_slots)
        return hidden, rows.before(context.view(*rows.tokens.shape, -1))

    def joining(self) -> Joining:
        tensors = self.tensors()
        embedding = tensors.get("embed_tokens.weight", self.embedding)
        parts = HeadParts(self.config, tensors, embedding, self.token_map)
        product = DenseLinear(tensors.get("lm_head.weight", self._frozen_head), None)
        logits = SlotLogits(product, self.config)
        return Joining(logits, build_head(parts), build_confidence(parts))


@dataclass
class Dflash(Anchored):
    """The knobs of a body, a reading of its slots, and a head that turns them into drafts.

    Attributes:
        conv: convolutions within a block, around both halves of every layer.
        confidence: a separate head learns how likely a draft is to be accepted.
        markov_form: how a Markov head reads the token before.
        head_rank: width of the head's factors.
        head_topk: tokens that a selector or a lattice scores in a slot.
        block_size: rows of a block.
        body: folder of a trained drafter whose body, sizes and vocabulary this one starts from.
    """

    name: str = "dflash"
    head: HeadKind = HeadKind.none
    slots: Slots = Slots.mask_first
    conv: bool = False
    confidence: bool = False
    markov_form: MarkovForm = MarkovForm.vanilla
    head_rank: int = 64
    head_topk: int = 8
    block_size: int = 8
    body: str | None = None

    @property
    def run_words(self) -> tuple[str, ...]:
        parts = {name: getattr(self, name) for name in ("head", "slots", "conv", "confidence", "markov_form")}
        return tuple(f"drafter.{name}={str(value).lower()}" for name, value in parts.items())

    def taps(self, target: FrozenTarget) -> tuple[Tap, ...]:
        if self.body is not None:
            return load_block(Path(self.body), target.config, torch.float32, "cpu")[0].taps
        return default_taps(target.config.num_layers, self.num_layers)

    def build(self, target: FrozenTarget, texts: Texts, seed: int) -> BlockModule:
        """Make a drafter that is untrained, or begins with those weights of the drafter in `body` that fit it."""
        config, body = self._begun(target, texts)
        fresh = random_tensors(block_tensor_shapes(config), torch.float32, torch.device("cpu"), seed)
        fresh["norm.weight"] = target.final_norm_weight.float().cpu()
        tensors = {name: begun_with(name, tensor) for name, tensor in fresh.items()} | tensors_of(config, body)
        return BlockModule(config, tensors, target)

    def _begun(self, target: FrozenTarget, texts: Texts) -> tuple[BlockConfig, Mapping[str, Tensor]]:
        """Return the sizes, and the weights to start from."""
        model = target.config
        config = random_block_config(model, BlockParts.of(self))
        if self.body is not None:
            found, tensors = load_block(Path(self.body), model, torch.float32, "cpu")
            own = {name: getattr(config, name) for name in ("head", "slots", "conv", "confidence_reads")}
            return replace(found, **own), tensors
        config = replace(config, mask_token_id=mask_token(self, texts, model.vocab_size))
        ids = draft_vocabulary(texts, target, self.draft_vocab_size)
        if len(ids) == model.vocab_size:
            return config, {}
        return replace(config, draft_vocab_size=len(ids)), vocabulary_maps(ids, model.vocab_size)

    def save(self, module: BlockModule, target: FrozenTarget, folder: Path) -> None:
        save_drafter(module.tensors(), block_json(module.config, target.config.num_layers, ZLAB), folder)

    def load(self, folder: Path, target: FrozenTarget) -> BlockModule:
        config, tensors = load_block(folder, target.config, torch.float32, "cpu")
        return BlockModule(config, tensors, target).to(target.device)

    def describe(self) -> str:
        return (
            f"A drafter of whole blocks: a body of {self.num_layers} layers over the pending token and "
            f"{self.block_size - 1} mask tokens, with head={self.head}, slots={self.slots}, conv={self.conv}. "
            "Embedding and output head are the target's where the file has none."
        )


@dataclass
class Dspark(Dflash):
    """A Markov head, a draft in every row, and a head for confidence."""

    name: str = "dspark"
    head: HeadKind = HeadKind.markov
    slots: Slots = Slots.anchor_first
    confidence: bool = True


@dataclass
class Domino(Dflash):
    """A GRU over the drafts so far."""

    name: str = "domino"
    head: HeadKind = HeadKind.gru
    alone_loss: float = 0.3


@dataclass
class Dflash2(Dflash):
    """A selector, and convolutions in the body."""

    name: str = "dflash2"
    head: HeadKind = HeadKind.selector
    conv: bool = True
    alone_loss: float = 1.0


@dataclass
class Lilicorr(Dflash):
    """A transformer over the candidates of all slots."""

    name: str = "lilicorr"
    head: HeadKind = HeadKind.lattice
    alone_loss: float = 1.0


def mask_token(knobs: Anchored, texts: Texts, vocab_size: int) -> int:
    """Return the mask token: the one that is configured, else the one that the target writes least."""
    return int(texts.counts(vocab_size).argmin()) if knobs.mask_token_id is None else knobs.mask_token_id


def begun_with(name: str, tensor: Tensor) -> Tensor:
    """Return the initial value of a weight, given a random draw for it."""
    if name.endswith(ZEROS):
        return torch.zeros_like(tensor)
    if name.endswith("base_kernel"):  # the convolution starts as the identity
        return torch.zeros_like(tensor).index_fill_(1, torch.zeros(1, dtype=torch.long), 1.0)
    if name.endswith(TABLES):
        return tensor / tensor.std() / tensor.shape[1] ** 0.5
    return tensor
