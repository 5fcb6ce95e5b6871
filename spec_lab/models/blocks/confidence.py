"""The confidence head of DSpark: estimates, before a slot is drafted, how likely its draft is to be accepted."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_lab.core.rows import rows_at
from spec_lab.models.blocks.heads import SlotWalk, at_column
from spec_lab.models.linear import Linear


@dataclass(frozen=True, slots=True)
class ConfidenceHead:
    """Reads the hidden row of a slot, and maybe the Markov head's embedding of the previous token.

    Attributes:
        embedding: [vocab, rank]; None if only the hidden row is read.
    """

    project: Linear
    embedding: torch.Tensor | None

    def __call__(self, walk: SlotWalk, previous: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """Return the probability [batch] of slot `column` [1], after the tokens `previous` [batch]."""
        read = at_column(walk.hidden, column)
        if self.embedding is not None:
            read = torch.cat((read, rows_at(self.embedding, previous)), dim=-1)
        return torch.sigmoid(self.project(read).squeeze(1).float())
