"""Plain torch does here what the kernels for trees of drafts do: beside those, for comparison, and where there is none.

A tree's rows name their parents: row 0, the root, is its own, every other row's stands before it, and a row that holds
no draft is its own too.
"""

from __future__ import annotations

import torch


def follow_reference(
    chosen: torch.Tensor, drafts: torch.Tensor, parents: torch.Tensor, active: torch.Tensor, depth: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Follow what the target chose from the root of each tree as long as it has been drafted.

    Args:
        chosen: [batch, N] the token that the target puts behind each row.
        drafts: [batch, N] the tokens of the rows.
        parents: [batch, N].
        active: [batch] bool.
        depth: the most drafts that are followed.

    Returns:
        What is emitted [batch, depth + 1], how much of it counts [batch], 0 where inactive, and the rows of the path
        [batch, depth + 1]. The tokens are those that were chosen, so the last that counts is the correction or, below a
        leaf, the bonus token.
    """
    is_draft = torch.arange(chosen.shape[1], device=chosen.device) > 0
    row = torch.zeros_like(chosen[:, :1])
    goes_on = active.unsqueeze(1)
    path, num_accepted = [row], torch.zeros_like(row)
    for _ in range(depth):
        hits = is_draft & (parents == row) & (drafts == chosen.gather(1, row))
        goes_on = goes_on & hits.any(dim=1, keepdim=True)
        row = torch.where(goes_on, hits.int().argmax(dim=1, keepdim=True), row)
        num_accepted = num_accepted + goes_on
        path.append(row)
    rows = behind_stays(torch.cat(path, dim=1), num_accepted, chosen.shape[1])
    return chosen.gather(1, rows), torch.where(active, num_accepted.squeeze(1) + 1, 0), rows


def impose_reference(
    imposed: torch.Tensor,
    best: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    active: torch.Tensor,
    depth: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take the first path of so many drafts, or of as many as the tree's longest has.

    Args:
        imposed: [batch, 1] how many drafts are to be accepted.
        best: [batch, N] the target's argmax behind each row, of which the one behind the path is emitted.

    Returns:
        What `follow_reference` returns; the other arguments are its own.
    """
    depths = depths_reference(parents, depth)
    num_accepted = torch.minimum(imposed, depths.amax(dim=1, keepdim=True))
    last = (depths == num_accepted).int().argmax(dim=1, keepdim=True)
    row, path = last, [last] * (depth + 1)
    for level in range(depth, -1, -1):
        path[level] = row
        row = torch.where(num_accepted >= level, parents.gather(1, row), row)
    rows = behind_stays(torch.cat(path, dim=1), num_accepted, drafts.shape[1])
    tokens = drafts.gather(1, rows).roll(-1, dims=1).scatter(1, num_accepted, best.gather(1, last))
    return tokens, torch.where(active, num_accepted.squeeze(1) + 1, 0), rows


def depths_reference(parents: torch.Tensor, depth: int) -> torch.Tensor:
    """Count the drafts on the way from the root to each row: [batch, N], of trees at most `depth` deep."""
    row = torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
    depths = torch.zeros_like(parents)
    for _ in range(depth):
        above = parents.gather(1, row)
        depths = depths + (above != row)
        row = above
    return depths


def behind_stays(path: torch.Tensor, num_accepted: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Keep of `path` [batch, depth + 1] the first `num_accepted` + 1 ([batch, 1]) rows; behind them the rows stay where
    they are, as those of a chain do."""
    columns = torch.arange(path.shape[1], device=path.device)
    return torch.where(columns <= num_accepted, path, columns.clamp(max=num_rows - 1))


def move_path_reference(
    caches: list[torch.Tensor],
    moved: torch.Tensor | None,
    features: torch.Tensor | None,
    path: torch.Tensor,
    kv_lens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
) -> None:
    """Move a path's cache rows to the slots behind its root, and its features beside each other.

    All are read before any is written; what is moved behind the end of a path is junk, as what it replaces was.

    Args:
        caches: [layers, num_slots, *shape] each, written: row j of a request lies in the slot of position L + j, and
            column c of its path goes to that of L + c.
        moved: [batch * (depth + 1), width], written: the features of the paths; None where there are none.
        features: [batch * N, width]; None likewise.
        path: [batch, depth + 1] rows, in column 0 the root.
        kv_lens: [batch] L.
        page_table: [batch, num_pages + 1], the last column scratch.
    """
    batch, num_columns = path.shape
    columns = torch.arange(num_columns, device=path.device)
    start, last_column = kv_lens.unsqueeze(1), page_table.shape[1] - 1
    slots = []
    for positions in (start + path, start + columns):
        pages = page_table.gather(1, (positions // page_size).clamp(max=last_column))
        slots.append((pages * page_size + positions % page_size)[:, 1:].reshape(-1))
    for rows in caches:
        rows.index_copy_(1, slots[1], rows.index_select(1, slots[0]))
    if moved is not None:
        assert features is not None
        first_rows = torch.arange(batch, device=path.device) * (features.shape[0] // batch)
        torch.index_select(features, 0, (first_rows.unsqueeze(1) + path).reshape(-1), out=moved)
