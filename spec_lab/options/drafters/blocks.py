"""drafter=dflash, and the presets of its parts: dspark, domino, dflash2, lilicorr.

A block drafter consists of a body, a reading of its slots, and a head. A preset is only a choice of these parts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spec_lab.checkpoints.block_config import HeadKind, MarkovForm, Slots
from spec_lab.config.choices import Weights
from spec_lab.config.option import knob, option
from spec_lab.config.run import Run
from spec_lab.core.errors import UserError
from spec_lab.options.drafters.weights import WeightsConfig

if TYPE_CHECKING:
    import torch

    from spec_lab.build.lab import Lab
    from spec_lab.checkpoints.block_config import BlockConfig
    from spec_lab.core.protocols import Drafter
    from spec_lab.models.blocks.model import BlockModel

log = logging.getLogger(__name__)


@option("drafter", "dflash")
class Dflash(WeightsConfig):
    """A block of mask tokens in one pass over the target's hidden states."""

    drafts_trees = True
    ingests_in_graphs = True
    one_pass = True

    head: HeadKind = knob(
        HeadKind.none, "how the slots of a block are related; none, DSpark's, Domino's, DFlash2's or LiLiCorr's"
    )
    slots: Slots = knob(
        Slots.mask_first, "a row predicts the token at its own position (DFlash), or the one after it (DSpark)"
    )
    conv: bool = knob(False, "convolutions within a block, around both halves of every layer")
    window: int | None = knob(
        None, "newest context rows that a block sees; null is the checkpoint's window, or all", least=1
    )
    confidence: bool = knob(False, "a separate head estimates confidence, for record.confidences")
    block_size: int = knob(8, "rows of a block of random weights", least=2, most=64)
    num_layers: int = knob(2, "layers of a body of random weights", least=1, most=64)
    head_rank: int = knob(256, "width of the factors of a head of random weights", least=1)
    head_topk: int = knob(16, "tokens that a head of random weights scores in a slot", least=1, most=256)
    markov_form: MarkovForm = knob(MarkovForm.vanilla, "how a Markov head reads the token before")

    def rows_written(self, run: Run) -> int:
        """Verify's rows, and a block after them. UserError if the block has fewer drafts than the run."""
        from spec_lab.checkpoints.block_layouts import read_block_config
        from spec_lab.checkpoints.families import read_model_config
        from spec_lab.checkpoints.random_weights import BlockParts, random_block_config

        target = read_model_config(run.target.folder)
        if self.weights == Weights.random:
            config = random_block_config(target, BlockParts.of(self))
        else:
            config, _ = read_block_config(self.folder(run), target)
        if self.num_draft_tokens > config.slots.most_drafts:
            raise UserError(
                f"drafter.num_draft_tokens={self.num_draft_tokens} is more than the {config.slots.most_drafts} drafts "
                f"of a block of {config.block_size} rows; lower it"
            )
        return max(2 * self.num_draft_tokens, self.num_draft_tokens + 1 + config.block_size)

    def read(self, lab: Lab) -> tuple[BlockConfig, dict[str, torch.Tensor]]:
        from spec_lab.checkpoints.block_checkpoint import load_block, without_head
        from spec_lab.checkpoints.random_weights import BlockParts, random_block

        target = lab.target.config
        if self.weights == Weights.random:
            config, tensors = random_block(target, BlockParts.of(self), lab.dtype, lab.device, lab.run.seed + 1)
        else:
            folder = self.folder(lab.run)
            config, tensors = load_block(folder, target, lab.dtype, lab.device)
            if self.head == HeadKind.none and config.head.kind != HeadKind.none:
                log.info("%s: its head is left out; drafter.head=%s drafts with it", folder, config.head.kind)
                config, tensors = without_head(config, tensors)
            self._refuse_other_parts(config, str(folder))
        return replace(config, most_context=self.window), tensors

    def model(self, lab: Lab, config: BlockConfig, tensors: Mapping[str, torch.Tensor]) -> BlockModel:
        from spec_lab.models.blocks.model import BlockModel

        return lab.beside_target(BlockModel, config, tensors)

    def drafter(self, lab: Lab, model: BlockModel) -> Drafter[Any]:
        """Make the drafter of one engine. With drafter.confidence its confidences are those of the confidence head."""
        from spec_lab.core.types import FeatureSpec
        from spec_lab.drafters.block import BlockDrafter, BlockTreeDrafter
        from spec_lab.drafters.block_context import ContextPass

        config = model.config
        features = FeatureSpec(layer_inputs=tuple(tap.layer_input for tap in config.taps))
        cache = lab.cache(config.body.layers)
        block_pass = ContextPass(
            num_draft_tokens=self.num_draft_tokens,
            model=model,
            features=features,
            cache=cache,
            backend=lab.backend,
            prune=lab.kept,
            span=lab.span,
            kernels=lab.kernels,
            host_waits=not lab.run.graph.captures,
        )
        if lab.run.sizes is not None:
            return BlockTreeDrafter(block_pass, *lab.tree(), lab.span)
        if not self.confidence:
            return BlockDrafter(block_pass, lab.picker(self), lab.span)
        picker = replace(lab, confidences=None).picker(self)  # a head of its own stores them
        return BlockDrafter(block_pass, picker, span=lab.span, confidence=model.confidence, confidences=lab.confidences)

    def _refuse_other_parts(self, config: BlockConfig, source: str) -> None:
        """Refuse parts that are not the checkpoint's, which would lower acceptance in silence.

        Only the head and the confidence head may be left out. The default form of a Markov head fits all.
        """
        form = getattr(config.head, "form", MarkovForm.vanilla)
        has = {"slots": config.slots.name, "head": config.head.kind, "conv": config.conv is not None}
        has |= {"confidence": config.confidence_reads > 0, "markov_form": form}
        fitting = {"confidence": False, "markov_form": MarkovForm.vanilla}
        wrong = {name: value for name, value in has.items() if getattr(self, name) not in (value, fitting.get(name))}
        if wrong:
            words = " ".join(f"drafter.{name}={str(value).lower()}" for name, value in wrong.items())
            raise UserError(f"{source}: the checkpoint does not fit drafter={self.name}; use {words}, or another path")


@option("drafter", "dspark")
class Dspark(Dflash):
    """A Markov head, a draft in every row, and a head for confidence."""

    head: HeadKind = HeadKind.markov
    slots: Slots = Slots.anchor_first
    confidence: bool = True


@option("drafter", "domino")
class Domino(Dflash):
    """A GRU over the drafts so far."""

    head: HeadKind = HeadKind.gru


@option("drafter", "dflash2")
class Dflash2(Dflash):
    """A selector, and convolutions in the body."""

    head: HeadKind = HeadKind.selector
    conv: bool = True


@option("drafter", "lilicorr")
class Lilicorr(Dflash):
    """A transformer over the candidates of all slots."""

    head: HeadKind = HeadKind.lattice
