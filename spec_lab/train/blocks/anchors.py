"""Anchors: the tokens of a text after which blocks are drafted. Also tells which drafts of a block count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_lab.checkpoints.taps import Tap
from spec_lab.train.frozen_target import FrozenTarget
from spec_lab.train.kept_states import KeptStates
from spec_lab.train.packed_rows import PackedRows


@dataclass(frozen=True, slots=True)
class AnchoredRows:
    """Rows of whole texts [batch, length], and where blocks begin in them.

    Attributes:
        anchors: [batch, anchors] ascending columns: the pending tokens of blocks. An anchor that is the first
            token of its text does not count.
    """

    tokens: Tensor
    segments: Tensor
    positions: Tensor
    anchors: Tensor

    def pending(self) -> Tensor:
        """Return the tokens [batch * anchors] that blocks begin with."""
        return self.tokens.gather(1, self.anchors).flatten()

    def lengths(self) -> Tensor:
        """For each block, return the number of tokens before it in its text, [batch * anchors]."""
        return self.positions.gather(1, self.anchors).flatten()

    def behind(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Gather `rows` [batch, length, ...] at `offsets` from each anchor: [batch * anchors, offsets, ...]. Columns
        are clamped to the row."""
        length = self.tokens.shape[1]
        columns = (self.anchors.unsqueeze(2) + offsets).clamp(0, length - 1)
        starts = length * torch.arange(len(rows), device=rows.device)
        return rows.flatten(0, 1)[(columns + starts.view(-1, 1, 1)).flatten(0, 1)]

    def before(self, rows: Tensor) -> Tensor:
        """Gather the entry of `rows` [batch, length, width] directly before each anchor: [batch * anchors, width]."""
        return self.behind(rows, torch.full((1,), -1, device=rows.device)).squeeze(1)


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """A batch of blocks: the input of the loss.

    Attributes:
        counts: [batch, anchors, K] bool: whether a slot counts (`counted_slots`).
        tapped: [batch, length, taps * hidden] the target's hidden states that the drafter reads.
        final_hidden: [batch, length, hidden] the input of the target's head.
    """

    rows: AnchoredRows
    counts: Tensor
    tapped: Tensor
    final_hidden: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all its tensors; `of` is the inverse."""
        rows = self.rows
        return rows.tokens, rows.segments, rows.positions, rows.anchors, self.counts, self.tapped, self.final_hidden

    @classmethod
    def of(cls, *tensors: Tensor) -> BlockBatch:
        return cls(AnchoredRows(*tensors[:4]), *tensors[4:])


def drawn_anchors(rows: PackedRows, num_anchors: int, generator: torch.Generator) -> Tensor:
    """Draw distinct ascending columns [batch, num_anchors]; fewer if a row has fewer tokens.

    Columns are preferred at which a text does not begin, and at which the target wrote this token and the text's next
    one. Rows with too few of these get others as well, whose slots do not count.
    """
    documents = written_by(rows)
    allowed = (documents >= 0) & (documents == F.pad(documents[:, 1:], (0, 1), value=-1)) & (rows.positions > 0)
    order = torch.rand(documents.shape, generator=generator).to(documents.device) + allowed
    return order.topk(min(num_anchors, documents.shape[1]), dim=1).indices.sort(dim=1).values


def written_by(rows: PackedRows) -> Tensor:
    """Return the number of each token's text [batch, length] if the target wrote the token, else -1."""
    return torch.where(rows.is_supervised, rows.segments, -1)


def counted_slots(rows: PackedRows, anchors: Tensor, num_slots: int) -> Tensor:
    """Return bool [batch, anchors, num_slots]: draft j counts if the target wrote all tokens from the anchor to it,
    within one text that does not begin at the anchor."""
    documents = F.pad(written_by(rows), (0, num_slots), value=-1)
    columns = anchors.unsqueeze(2) + torch.arange(num_slots + 1, device=anchors.device)
    found = documents.gather(1, columns.flatten(1)).view(columns.shape)
    pending = found[:, :, :1]
    has_context = (rows.positions.gather(1, anchors) > 0).unsqueeze(2)
    return ((found[:, :, 1:] == pending) & (pending >= 0) & has_context).cumprod(2).bool()


@torch.no_grad()
def block_batch(
    target: FrozenTarget | KeptStates, rows: PackedRows, anchors: Tensor, taps: Sequence[Tap], num_slots: int
) -> BlockBatch:
    """Run the target over rows [batch, length], and lay out the blocks after `anchors` [batch, anchors]."""
    outputs = target.run(rows, taps)
    anchored = AnchoredRows(rows.tokens.long(), rows.segments, rows.positions.long(), anchors)
    return BlockBatch(anchored, counted_slots(rows, anchors, num_slots), outputs.tapped, outputs.final_hidden)
