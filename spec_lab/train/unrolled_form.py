"""The functions that train and measure unrolled drafters on packed rows (`PackedForm`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spec_lab.checkpoints.taps import Tap
from spec_lab.train.frozen_target import FrozenTarget
from spec_lab.train.head_recipe import PackedForm
from spec_lab.train.packed_rows import PackedRows, RowPlaces
from spec_lab.train.packed_training import packed_inputs, train_packed
from spec_lab.train.serving import Serving
from spec_lab.train.teacher_forced import teacher_forced
from spec_lab.train.unroll import UnrolledDrafter


@torch.no_grad()
def unrolled_laws(
    drafter: UnrolledDrafter,
    target: FrozenTarget,
    rows: PackedRows,
    pending: Tensor,
    taps: Sequence[Tap],
    num_steps: int,
) -> Tensor:
    """Return the logits [pending, num_steps, draft vocabulary] of the drafts after the columns `pending` of one row.

    Draft s after column c is made in row c - 1 + s.
    """
    embeddings, _, _, places, parts, *features = packed_inputs(target, drafter, rows, taps, num_steps)
    states = drafter.unroll(embeddings, tuple(features), num_steps, RowPlaces(places, parts))
    return torch.stack([drafter.draft_logits(state[0, pending - 1 + step]) for step, state in enumerate(states)], 1)


UNROLLED = PackedForm(train_packed, unrolled_laws, Serving.step_laws, teacher_forced)
