"""A round's drafts as a tree: rows that name their parent, and what follows from that.

Row 0 is the pending token, the root, and its own parent; every other row is a draft below the row that it names as its
parent, which stands before it, or holds no draft, has none below it, and is its own parent too. Every
tensor has a fixed shape: what differs from round to round is its contents.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
        visible: [batch, num_queries, num_tail] bool, whether a row sees each of the newest keys: its ancestors' and its
            own, which is among the last `num_queries`.
        depths: [batch, num_queries] position of each row behind the end of the prefix.
        key_depths: [batch, num_tail] the same of the newest keys; siblings share a position, windows count positions.
        paths: what `paths_of` gives, derived by backends that read a row's keys one behind the other; None elsewhere.
    """

    visible: torch.Tensor
    depths: torch.Tensor
    key_depths: torch.Tensor
    paths: torch.Tensor | None = None


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


def paths_of(rows: TreeRows) -> torch.Tensor:
    """Say which of the newest keys each row sees by position behind the prefix: [batch, num_queries, num_tail + 1].

    A row sees one key of each depth up to its own; behind that, and in the last column, stands junk.
    """
    num_tail = rows.visible.shape[2]
    at = torch.where(rows.visible, rows.key_depths.unsqueeze(1), num_tail)
    paths = at.new_zeros(*at.shape[:2], num_tail + 1)
    return paths.scatter_(2, at, torch.arange(num_tail, device=at.device).expand_as(at))
