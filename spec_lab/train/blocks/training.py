"""Trains block drafters on packed texts with their frozen target, and finds where their drafts agree with a text."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from spec_lab.checkpoints.taps import Tap
from spec_lab.train.block_config import SlotTrainingConfig
from spec_lab.train.blocks.anchors import block_batch, drawn_anchors
from spec_lab.train.blocks.drafter import SlotDrafter, walked_slots
from spec_lab.train.blocks.loss import BlockLoss
from spec_lab.train.data import step_generator
from spec_lab.train.frozen_target import FrozenTarget
from spec_lab.train.head_recipe import PackedForm
from spec_lab.train.kept_states import KeptStates
from spec_lab.train.loop import CurvePoint, train
from spec_lab.train.packed_rows import PackedRows
from spec_lab.train.packed_training import PackedTask, facts_of
from spec_lab.train.serving import Serving
from spec_lab.train.teacher_forced import TeacherForced

log = logging.getLogger(__name__)

FORCED_ANCHORS = 32
"""The most anchors of each row whose drafts teacher forcing counts."""


def train_on_texts(drafter: SlotDrafter, config: SlotTrainingConfig, task: PackedTask) -> list[CurvePoint]:
    """Train `drafter` in place on the task's texts. It stays on the task's device."""
    drafter.to(task.device)
    return train_blocks(
        drafter, config, task, PackedRows.of(task.texts.packed(task.row_length, task.seed), task.device)
    )


def train_blocks(
    drafter: SlotDrafter, config: SlotTrainingConfig, task: PackedTask, rows: PackedRows
) -> list[CurvePoint]:
    """Train `drafter` in place on rows [rows, length] of the task's texts."""
    log.info("%d rows of %d tokens, %.0f%% of them supervised", *facts_of(rows))
    target, group, seed, num_slots = task.target, task.group, task.seed, drafter.num_slots

    def batch_of(step: int) -> tuple[Tensor, ...]:
        batch = rows.batch(step, config.optimisation.batch_size, seed)
        anchors = drawn_anchors(batch, config.num_anchors, step_generator(step, seed, torch.device("cpu")))
        own = slice(group.rank, None, group.size)
        return *batch.rows(own).tensors(), anchors[own]

    source = KeptStates(target, task.kept_bytes) if task.kept_bytes else target

    def inputs_of(*picked: Tensor) -> tuple[Tensor, ...]:
        *of_rows, anchors = picked
        return block_batch(source, PackedRows(*of_rows), anchors, task.taps, num_slots).tensors()

    loss = BlockLoss(drafter, target, config, group)
    return train(
        loss,
        batch_of,
        config.optimisation,
        task.checkpoint,
        target.device,
        inputs_of=inputs_of,
        compiled=lambda module: module,
        watch=task.watch,
        group=group,
        in_16_bits=target.in_16_bits,
    )


@torch.no_grad()
def block_laws(
    drafter: SlotDrafter, target: FrozenTarget, rows: PackedRows, pending: Tensor, taps: Sequence[Tap], num_drafts: int
) -> Tensor:
    """Return the logits [pending, num_drafts, vocab] of the blocks after the columns `pending` of one row; -inf for
    tokens that the head does not score."""
    batch = block_batch(target, rows, pending[None], taps, drafter.num_slots)
    return torch.stack([law.target_logits(law.scores) for law in walked_slots(drafter, batch, num_drafts)], 1)


@torch.no_grad()
def forced_blocks(
    drafter: SlotDrafter, target: FrozenTarget, rows: PackedRows, taps: Sequence[Tap], num_drafts: int, batch_size: int
) -> TeacherForced:
    """Count by teacher forcing how many drafts agree, after some anchors of each of the rows [rows, length]."""
    counts, generator = TeacherForced([0] * num_drafts, [0] * num_drafts), torch.Generator().manual_seed(0)
    for start in range(0, rows.num_rows, batch_size):
        part = rows.rows(slice(start, start + batch_size))
        batch = block_batch(target, part, drawn_anchors(part, FORCED_ANCHORS, generator), taps, num_drafts)
        steps = torch.arange(num_drafts, device=part.tokens.device)
        states, counted = batch.rows.behind(batch.final_hidden, steps), batch.counts.flatten(0, 1)
        alive = counted[:, 0]
        with torch.autocast(target.device.type, dtype=torch.bfloat16, enabled=target.in_16_bits):
            for slot, law in enumerate(walked_slots(drafter, batch, num_drafts)):
                alive = alive & counted[:, slot]
                counts.reached[slot] += int(alive.sum())
                alive = alive & (law.greedy(law.scores) == target.likeliest(states[:, slot]))
                counts.matched[slot] += int(alive.sum())
        mass = target.log_probabilities(states[:, 0], drafter.draft_token_ids).exp().sum(-1)
        counts.lost += float(((1 - mass) * counted[:, 0]).sum())
        counts.num_rows += int(counted[:, 0].sum())
    return counts


BLOCK_FORM = PackedForm(train_on_texts, block_laws, Serving.slot_laws, forced_blocks)


def block_loss_words(config: SlotTrainingConfig) -> str:
    """Describe `BlockLoss` for a card."""
    return (
        f"loss={config.loss} over the blocks after {config.num_anchors} anchors in each row, with slots weighted by "
        f"slot_weights={config.slot_weights} and slot_decay={config.slot_decay:g}, and normalise_by="
        f"{config.normalise_by}"
    )
