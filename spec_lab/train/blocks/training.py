"""Trains drafters of blocks on packed texts beside their frozen target, and asks where they agree with a text."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_lab.train.block_config import BlockTrainingConfig
from spec_lab.train.blocks.anchors import block_batch, drawn_anchors
from spec_lab.train.blocks.drafter import TrainableBlock
from spec_lab.train.blocks.loss import BlockLoss
from spec_lab.train.data import step_generator
from spec_lab.train.drafter import DraftMatcher
from spec_lab.train.frozen_target import FrozenTarget
from spec_lab.train.generations import Generations
from spec_lab.train.group import ALONE, TrainingGroup
from spec_lab.train.loop import CurvePoint, Watch, train
from spec_lab.train.packed_rows import PackedRows
from spec_lab.train.packed_training import facts_of
from spec_lab.train.texts.packing import pack

log = logging.getLogger(__name__)


def packed_generations(texts: Generations, row_length: int, seed: int) -> PackedRows:
    """Put whole texts into rows, several in a row."""
    is_there = torch.arange(texts.tokens.shape[1]) < texts.lengths[:, None]
    starts = torch.cat((texts.lengths.new_zeros(1), texts.lengths.cumsum(0)))
    packed = pack(texts.tokens[is_there], starts, texts.prompt_lengths, row_length, seed)
    return PackedRows.of(packed, torch.device("cpu"))


def train_blocks(
    drafter: TrainableBlock,
    target: FrozenTarget,
    rows: PackedRows,
    config: BlockTrainingConfig,
    checkpoint: Path,
    seed: int,
    watch: Watch | None = None,
    group: TrainingGroup = ALONE,
) -> list[CurvePoint]:
    """Train `drafter` in place on rows [rows, length]."""
    log.info("%d rows of %d tokens, %.0f%% of them supervised", *facts_of(rows))
    batch_size, num_slots = config.optimisation.batch_size, drafter.num_slots

    def batch_of(step: int) -> tuple[Tensor, ...]:
        batch = rows.batch(step, batch_size, seed)
        anchors = drawn_anchors(batch, config.num_anchors, step_generator(step, seed, torch.device("cpu")))
        own = slice(group.rank, None, group.size)
        return *batch.rows(own).tensors(), anchors[own]

    def inputs_of(*picked: Tensor) -> tuple[Tensor, ...]:
        *of_rows, anchors = picked
        return block_batch(target, PackedRows(*of_rows), anchors, drafter.config.taps, num_slots).tensors()

    loss = BlockLoss(drafter, target, config, group)
    return train(
        loss,
        batch_of,
        config.optimisation,
        checkpoint,
        target.device,
        inputs_of=inputs_of,
        compiled=lambda module: module,
        watch=watch,
        group=group,
    )


def block_matcher(drafter: TrainableBlock, target: FrozenTarget) -> DraftMatcher:
    """Tell where the drafter agrees with a text, in the dtype of its weights."""

    @torch.no_grad()
    def of_text(text: Tensor, num_draft_tokens: int) -> Tensor:
        """Return bool [length - 1, num_draft_tokens] of a text [length]."""
        length = len(text)
        places = torch.arange(length, device=text.device)[None]
        rows = PackedRows(text[None], torch.zeros_like(places), places, torch.ones_like(places, dtype=torch.bool))
        batch = block_batch(target, rows, places[:, 1:], drafter.config.taps, num_draft_tokens)
        hidden, context = drafter.slots(batch.rows, batch.tapped)
        tokens = batch.rows.behind(batch.rows.tokens, torch.arange(num_draft_tokens + 1, device=text.device))
        joining, found = drafter.joining(), []
        for number, slot in enumerate(joining.walked(joining.rows(hidden, context), tokens)):
            if number == num_draft_tokens:
                break
            found.append(slot.law.greedy(hidden) == tokens[:, number + 1])
        return torch.stack(found, 1) & batch.counts[0]

    def match(tokens: Tensor, num_draft_tokens: int) -> Tensor:
        matches = torch.stack([of_text(text, num_draft_tokens) for text in tokens])
        return F.pad(matches, (0, 0, 0, 1))

    return match


def block_loss_words(config: BlockTrainingConfig) -> str:
    """Say how a card names `BlockLoss`."""
    return (
        f"loss={config.loss} of whole blocks behind {config.num_anchors} anchors a row, slots weighted by "
        f"{config.slot_weights} with g={config.slot_decay:g}, divided by {config.normalise_by}"
    )
