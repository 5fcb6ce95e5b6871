"""A tree's growth and the move of its path in plain torch, for comparison, and for runs without kernels.

Row 0 of a tree, the root, and rows without a draft are their own parents. Each other row's parent precedes it.
"""

from __future__ import annotations

import torch


def move_path_reference(
    caches: list[torch.Tensor],
    moved: torch.Tensor | None,
    features: torch.Tensor | None,
    path: torch.Tensor,
    kv_lens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
) -> None:
    """Move a path's cache rows to the slots after its root, and gather its features.

    All rows are read before any is written. Past the end of a path, junk is moved over junk.

    Args:
        caches: [layers, num_slots, *shape] each, written: row j of a request is in the slot of position L + j. The row
            in column c of its path is moved to the slot of position L + c.
        moved: [batch * (depth + 1), width], written: the features of the paths; None if there are none.
        features: [batch * N, width]; None likewise.
        path: [batch, depth + 1] rows; column 0 is the root.
        kv_lens: [batch], the committed length L of each request.
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


def rank_tokens_reference(
    tokens: torch.Tensor, log_probs: torch.Tensor, logits: torch.Tensor, token_map: torch.Tensor | None
) -> None:
    """Find the likeliest tokens of each row; ties go to the lowest id in the head.

    Args:
        tokens: [..., topk], written: the likeliest first.
        log_probs: [..., topk] float32, written: their log probabilities.
        logits: [..., vocab].
        token_map: [vocab] the target id of each id in the head; None if they are equal.
    """
    logits = logits.float()
    found = first_in_order(logits, tokens.shape[-1])
    tokens.copy_(found if token_map is None else token_map[found])
    # Rounding can make the sum smaller than its largest term, but a child must not be likelier than its parent.
    torch.clamp(logits.gather(-1, found) - logits.logsumexp(dim=-1, keepdim=True), max=0.0, out=log_probs)


def first_in_order(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices [..., count] of the largest of `values` [..., vocab]; ties go to the lowest index.

    At least `count` values must be above -inf. The largest are found one by one, since `torch.topk` promises no order
    of equal values.
    """
    left, found = values.clone(), []
    for _ in range(count):
        best = left.argmax(dim=-1, keepdim=True)
        left.scatter_(-1, best, float("-inf"))
        found.append(best)
    return torch.cat(found, dim=-1)


def choose_branches_reference(
    pool_tokens: torch.Tensor,
    pool_scores: torch.Tensor,
    pool_parents: torch.Tensor,
    branch_tokens: torch.Tensor,
    came_from: torch.Tensor,
    numbers: torch.Tensor,
    branch_scores: torch.Tensor,
    gathered: torch.Tensor,
    found_tokens: torch.Tensor,
    log_probs: torch.Tensor,
    numbers_before: torch.Tensor | None,
    scores_before: torch.Tensor | None,
    hidden: torch.Tensor,
    num_before: int,
) -> None:
    """Add the drafts of a level to the pool, and choose the best of them as branches; ties go to the earlier.

    Args:
        pool_tokens: [batch, pool size], written from column `num_before` on. So are `pool_scores`, the sums of log
            probabilities from the root, and `pool_parents`, the pool index of each draft's parent, or -1.
        branch_tokens: [batch, topk], written: the branches' tokens, best first.
        came_from: [batch, topk], written: each branch's parent, as an index into the branches of the level before.
        numbers: [batch, topk], written: the branches' indices in the pool.
        branch_scores: [batch, topk], written.
        gathered: [batch * topk, hidden_size], written: the rows of `hidden` of each branch's parent.
        found_tokens: [batch, branches before, topk] the candidates below each branch of the level before, with their
            `log_probs`.
        numbers_before: [batch, topk] the pool indices of these branches, with their `scores_before`; None for the root.
        hidden: [batch, branches before, hidden_size].
    """
    topk = branch_tokens.shape[1]
    scores, parents = scored(log_probs, numbers_before, scores_before)
    tokens = found_tokens.flatten(1)
    level = slice(num_before, num_before + tokens.shape[1])
    pool_tokens[:, level], pool_scores[:, level], pool_parents[:, level] = tokens, scores, parents
    chosen = _best_first(scores, topk)
    branch_tokens.copy_(tokens.gather(1, chosen))
    came_from.copy_(torch.div(chosen, topk, rounding_mode="floor"))
    numbers.copy_(chosen + num_before)
    branch_scores.copy_(scores.gather(1, chosen))
    index = came_from.unsqueeze(2).expand(-1, -1, hidden.shape[2])
    gathered.copy_(hidden.gather(1, index).flatten(0, 1))


def choose_rows_reference(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    pool_tokens: torch.Tensor,
    pool_scores: torch.Tensor,
    pool_parents: torch.Tensor,
    found_tokens: torch.Tensor,
    log_probs: torch.Tensor,
    numbers_before: torch.Tensor | None,
    scores_before: torch.Tensor | None,
    num_before: int,
) -> None:
    """Turn the best drafts into rows, best first, so that the first rows are the best smaller tree; ties go to the
    earlier.

    Args:
        tokens: [batch, N - 1], written.
        parents: [batch, N], written: the parent of each row.
        num_before: the number of drafts in the pool. Those of the last level follow them, in the form that
            `choose_branches_reference` takes.
    """
    scores, found_parents = scored(log_probs, numbers_before, scores_before)
    all_scores = torch.cat((pool_scores[:, :num_before], scores), dim=1)
    all_tokens = torch.cat((pool_tokens[:, :num_before], found_tokens.flatten(1)), dim=1)
    all_parents = torch.cat((pool_parents[:, :num_before], found_parents), dim=1)
    chosen = _best_first(all_scores, tokens.shape[1])
    tokens.copy_(all_tokens.gather(1, chosen))
    parents.copy_(parents_of_rows(all_parents, chosen))


def parents_of_rows(parents: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the parent row of each row [batch, N], if the drafts at indices `chosen` [batch, N - 1] become rows.

    `parents` [batch, drafts] are the drafts' parents as indices, or -1 for the root.
    """
    # The row of every chosen draft, by its index + 1; the root, index -1, comes first.
    rows = torch.arange(1, chosen.shape[1] + 1, device=chosen.device).expand_as(chosen)
    row_of = torch.zeros_like(parents).scatter(1, chosen, rows)
    row_of = torch.cat((torch.zeros_like(row_of[:, :1]), row_of), dim=1)
    below = row_of.gather(1, parents.gather(1, chosen) + 1)
    return torch.cat((torch.zeros_like(below[:, :1]), below), dim=1)


def scored(
    log_probs: torch.Tensor, numbers: torch.Tensor | None, scores: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores [batch, drafts] of the candidates below branches, and their parents."""
    if numbers is None or scores is None:
        flat = log_probs.flatten(1)
        return flat, torch.full_like(flat, -1, dtype=torch.int64)
    return (scores.unsqueeze(2) + log_probs).flatten(1), numbers.repeat_interleave(log_probs.shape[2], dim=1)


def _best_first(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the `count` best scores [batch, drafts]; ties go to the earlier."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
