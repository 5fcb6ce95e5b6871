"""A round's drafts as a tree: rows that name their parent, and what follows from that.

Row 0 is the pending token, the root, and its own parent; every other row is a draft below the row that it names as its
parent, which stands before it, or holds no draft, has none below it, and is its own parent too. Every
tensor has a fixed shape: what differs from round to round is its contents.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(slots=True)
class DraftTree:
    """The drafts of a round.

    Attributes:
        tokens: [batch, N - 1] drafts, of which siblings differ.
        parents: [batch, N] row of each row's parent.
    """

    tokens: torch.Tensor
    parents: torch.Tensor


@dataclass(slots=True)
class TreeRows:
    """The newest keys as the query rows of a tree see them; those before, the prefix, are there for every row.

    Attributes:
        path_slots: [batch, num_queries, positions] the cache slot of the key that a row sees at each position behind
            the prefix, up to its own: its ancestors' and its own; junk behind that.
        depths: [batch, num_queries] position of each row behind the end of the prefix.
        num_tail: newest keys, in the slots behind the prefix; the query rows write the last of them.
    """

    path_slots: torch.Tensor
    depths: torch.Tensor
    num_tail: int


def ancestors_and_self(parents: torch.Tensor, depth: int) -> torch.Tensor:
    """Say which rows are on the way from the root to each row: [batch, N, N] bool, of trees at most `depth` deep."""
    num_rows = parents.shape[1]
    rows = torch.arange(num_rows, device=parents.device)
    newest = rows.expand_as(parents)
    seen = rows == newest.unsqueeze(2)
    for _ in range(depth):
        newest = parents.gather(1, newest)
        seen = seen | (rows == newest.unsqueeze(2))
    return seen


def climb(parents: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the way from the root to each row, in trees at most `depth` deep.

    Returns:
        paths: [batch, N, depth + 1] the rows on the way by their depth, junk but in range behind the row itself.
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


def keep_rows(
    tokens: torch.Tensor, parents: torch.Tensor, is_kept: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Move the drafts that are kept to the front of their tree, in their order, and drop rows behind `width` drafts.

    Args:
        tokens: [batch, N].
        parents: [batch, N]; the parent of what is kept is kept.
        is_kept: [batch, N - 1] says which drafts are, at most `width` of a tree.

    Returns:
        Tokens and parents [batch, width + 1]. Rows between what is kept and there hold no draft.
    """
    order = is_kept.sort(dim=1, descending=True, stable=True)
    rows = F.pad(order.indices[:, :width] + 1, (1, 0))  # the root first
    numbers = torch.arange(width + 1, device=rows.device).expand_as(rows)
    row_of = torch.zeros_like(parents).scatter(1, rows, numbers)
    holds_draft = F.pad(order.values[:, :width], (1, 0), value=True)
    return tokens.gather(1, rows), torch.where(holds_draft, row_of.gather(1, parents.gather(1, rows)), numbers)
