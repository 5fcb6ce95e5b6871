"""The sizes of an engine's caches: the longest sequence, how far a round writes past its end, and the number of
pages."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from spec_lab.checkpoints.families import read_model_config
from spec_lab.config.choices import Rollback
from spec_lab.config.run import Run
from spec_lab.core.kv_cache import NUM_RESERVED_PAGES
from spec_lab.core.types import Request
from spec_lab.workloads.conversations import num_tokens, require_room


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of an engine's caches.

    Attributes:
        max_seq_len: the most tokens of a prompt and its output together.
        margin: number of positions past `max_seq_len` that a round may write: those of `rows_behind`, and K + 1 more if
            the host is a round behind the device and must end requests itself.
        max_kv_len: the longest committed length at the start of a round.
        num_rows: number of rows that verify runs for a request with a chain.
        rollback: how layers that keep a state undo rejected rows.
    """

    num_slots: int
    max_seq_len: int
    margin: int
    page_size: int
    num_pages: int
    max_kv_len: int
    num_rows: int = 1
    rollback: Rollback = Rollback.checkpoints

    def one_sequence(self) -> Limits:
        """Return the sizes for one sequence at a time, of the same maximum length."""
        num_pages = _num_pages(self.max_seq_len + self.margin, self.page_size) + NUM_RESERVED_PAGES
        return dataclasses.replace(self, num_slots=1, num_pages=num_pages)


def engine_limits(run: Run, requests: list[Request]) -> Limits:
    """Return sizes that hold `batch_size` of the longest requests (or all, if there are fewer), unless the cache group
    says otherwise.

    Raises:
        UserError: the longest request does not fit.
    """
    longest = max(requests, key=num_tokens)
    require_room(longest, longest_sequence(run))
    max_seq_len = run.cache.max_seq_len or num_tokens(longest)
    # Unless the device ends requests itself, a round runs past an end that the host has not read yet.
    is_late = run.graph.overlap and run.graph.rounds_per_replay == 1
    num_late = run.drafter.num_draft_tokens + 1 if is_late else 0
    margin = rows_behind(run) + num_late
    page_size = run.cache.page_size
    num_slots = min(run.batch_size, len(requests))
    pages_each = _num_pages(max_seq_len + margin, page_size)
    num_pages = run.cache.num_pages or pages_each * num_slots + NUM_RESERVED_PAGES
    return Limits(num_slots, max_seq_len, margin, page_size, num_pages=num_pages, max_kv_len=max_seq_len + num_late)


def longest_sequence(run: Run) -> int:
    """Return the most tokens, of prompt and output, that target and cache support. Past `max_dense_positions`, which
    drafts reach first, the target's attention changes (index_topk, or queries scaled by position)."""
    target = read_model_config(run.target.folder)
    most = [target.max_position_embeddings, run.cache.max_seq_len]
    if target.max_dense_positions is not None:
        most.append(target.max_dense_positions - rows_behind(run))
    return min(filter(None, most))


def rows_behind(run: Run) -> int:
    """Return how many positions past the last token a round may write: 2K for a chain, of which verify writes K + 1.

    A block drafter always writes a whole block. The branches of a tree have separate slots: verify writes one for each
    row, and a drafter one for each branch and level.
    """
    sizes, reach = run.sizes, run.drafter.rows_written(run)
    if sizes is None:
        return reach
    return max(reach, sizes.num_rows, sizes.depth + (sizes.depth - 1) * sizes.width)


def _num_pages(num_positions: int, page_size: int) -> int:
    return -(-num_positions // page_size)
