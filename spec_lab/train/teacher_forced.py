"""Estimates a drafter's acceptance rates by step on held-out rows, by teacher forcing instead of decoding.

It is an estimate, since the drafter reads the text's tokens instead of its own drafts. Records also have the acceptance
of decoding (`decoded`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spec_lab.checkpoints.taps import Tap
from spec_lab.train.frozen_target import FrozenTarget
from spec_lab.train.packed_rows import PackedRows, RowPlaces
from spec_lab.train.packed_training import chunks, packed_inputs
from spec_lab.train.unroll import UnrolledDrafter


@dataclass(slots=True)
class TeacherForced:
    """Counts over anchors.

    Attributes:
        reached: for each step, the number of anchors whose earlier drafts all equal the target's likeliest tokens.
        matched: for each step, the number of these anchors whose draft of this step does too.
        lost: sum over rows of the target's probability outside the draft vocabulary.
    """

    reached: list[int] = field(default_factory=list)
    matched: list[int] = field(default_factory=list)
    lost: float = 0.0
    num_rows: int = 0

    def report(self) -> dict[str, object]:
        """Return the figures in the form of a record."""
        rates = [matched / max(reached, 1) for matched, reached in zip(self.matched, self.reached, strict=True)]
        survival, length = 1.0, 1.0
        for rate in rates:
            survival *= rate
            length += survival
        return {
            "conditional_rates": rates,
            "acceptance_length": length,
            "lost_probability": self.lost / max(self.num_rows, 1),
            "rows": self.num_rows,
        }


@torch.no_grad()
def teacher_forced(
    drafter: UnrolledDrafter,
    target: FrozenTarget,
    rows: PackedRows,
    taps: Sequence[Tap],
    num_steps: int,
    batch_size: int,
) -> TeacherForced:
    """Count, over the anchors of rows [rows, length], the drafts that agree."""
    counts = TeacherForced([0] * num_steps, [0] * num_steps)
    for start in range(0, rows.num_rows, batch_size):
        _count(counts, drafter, target, rows.rows(slice(start, start + batch_size)), taps, num_steps)
    return counts


def _count(
    counts: TeacherForced,
    drafter: UnrolledDrafter,
    target: FrozenTarget,
    rows: PackedRows,
    taps: Sequence[Tap],
    num_steps: int,
) -> None:
    inputs = packed_inputs(target, drafter, rows, taps, num_steps)
    embeddings, hidden, counted, positions, segments, *features = inputs
    with torch.autocast(hidden.device.type, dtype=torch.bfloat16, enabled=target.in_16_bits):
        states = drafter.unroll(embeddings, tuple(features), num_steps, RowPlaces(positions, segments))
        agrees = _agreement(counts, drafter, target, hidden, counted[0], states)
    alive = counted[0]
    for step, agreement in enumerate(agrees):
        # Column a is the anchor at row a, whose draft of this step is in row a + step.
        alive = alive[:, : alive.shape[1] - (step > 0)] & counted[step][:, step:]
        counts.reached[step] += int(alive.sum())
        alive = alive & agreement[:, step:]
        counts.matched[step] += int(alive.sum())


def _agreement(
    counts: TeacherForced,
    drafter: UnrolledDrafter,
    target: FrozenTarget,
    hidden: Tensor,
    counted: Tensor,
    states: Sequence[Tensor],
) -> list[Tensor]:
    """Return for each step whether each row's draft is the target's likeliest token, bool [batch, rows]."""
    ids = drafter.draft_token_ids()
    flat, flat_counted = hidden.flatten(0, 1), counted.flatten()
    found: list[list[Tensor]] = [[] for _ in states]
    for part in chunks(flat.shape[0], target.config.vocab_size):
        best = target.likeliest(flat[part])
        mass = target.log_probabilities(flat[part], ids).exp().sum(-1)
        counts.lost += float(((1 - mass) * flat_counted[part]).sum())
        for agreed, state in zip(found, states, strict=True):
            agreed.append(ids[drafter.draft_logits(state.flatten(0, 1)[part]).argmax(-1)] == best)
    counts.num_rows += int(flat_counted.sum())
    return [torch.cat(agreed).view(counted.shape) for agreed in found]
