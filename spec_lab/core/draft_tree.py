"""A round's drafts as a tree: each row names its parent.

Row 0 is the root. It holds the pending token, and is its own parent. A row with a draft comes after its parent. A row
without a draft is its own parent, and no draft is below it. All tensors have fixed shapes; only their contents change
from round to round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class DraftTree:
    """The drafts of a round.

    Attributes:
        tokens: [batch, N - 1] drafts; siblings are distinct, unless they were drawn with replacement.
        parents: [batch, N] the parent of each row.
    """

    tokens: torch.Tensor
    parents: torch.Tensor


@dataclass(slots=True)
class TreeRows:
    """The newest keys that each query row of a tree sees. All rows also see the prefix before these, up to a window.

    Attributes:
        path_slots: [batch, num_queries, positions] the cache slots of the keys that a row sees after the prefix, by
            position: those of its ancestors, then its own; junk after that.
        depths: [batch, num_queries] position of each row, counted from the end of the prefix.
        num_tail: the number of newest keys, in the slots after the prefix; the query rows write the last of them.
    """

    path_slots: torch.Tensor
    depths: torch.Tensor
    num_tail: int


def ancestors_and_self(parents: torch.Tensor, depth: int) -> torch.Tensor:
    """Return which rows are on the path from the root to each row: [batch, N, N] bool, in trees of up to `depth`
    levels."""
    num_rows = parents.shape[1]
    rows = torch.arange(num_rows, device=parents.device)
    newest = rows.expand_as(parents)
    seen = rows == newest.unsqueeze(2)
    for _ in range(depth):
        newest = parents.gather(1, newest)
        seen = seen | (rows == newest.unsqueeze(2))
    return seen


def climb(parents: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the path from the root to each row, in trees of up to `depth` levels.

    Returns:
        paths: [batch, N, depth + 1] the rows on the path by depth; junk, but valid indices, after the row itself.
        depths: [batch, N].
    """
    batch, num_rows = parents.shape
    rows = torch.arange(num_rows, device=parents.device).expand(batch, -1)
    upwards = [rows]
    for _ in range(depth):
        upwards.append(parents.gather(1, upwards[-1]))
    climbed = torch.stack(upwards, dim=2)
    depths = (climbed != climbed[:, :, -1:]).sum(dim=2)
    steps = depths.unsqueeze(2) - torch.arange(depth + 1, device=parents.device)
    return climbed.gather(2, steps.clamp(min=0)), depths
