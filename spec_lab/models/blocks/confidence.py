"""A head says of each slot how likely its draft is to be accepted (DSpark), from what stands before the draft."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_lab.core.rows import rows_at
from spec_lab.models.blocks.heads import SlotWalk, at_column
from spec_lab.models.linear import Linear


@dataclass(frozen=True, slots=True)
class ConfidenceHead:
    """Reads the hidden row of a slot, and the Markov head's embedding of the token before.

    Attributes:
        embedding: [vocab, rank]; None where the hidden row is all that is read.
    """

    project: Linear
    embedding: torch.Tensor | None

    def __call__(self, walk: SlotWalk, previous: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """Return the probability [batch] of slot `column` [1], behind the tokens `previous` [batch]."""
        read = at_column(walk.hidden, column)
        if self.embedding is not None:
            read = torch.cat((read, rows_at(self.embedding, previous)), dim=-1)
        return torch.sigmoid(self.project(read).squeeze(1).float())
