"""The steps between the forwards of a round for kernels=native. Each is one call, where torch takes ten or more."""

from __future__ import annotations

import torch

from spec_kernels.native.build import library
from spec_kernels.operators import cpu_operator, empty_verdict


@cpu_operator("native_strict", mutates_args=("tokens", "num_emitted"))
def write_strict(
    tokens: torch.Tensor,
    num_emitted: torch.Tensor,
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    active: torch.Tensor,
    num_drafts: torch.Tensor | None = None,
) -> None:
    """Judge drafts as `spec_kernels.strict` does.

    Args:
        tokens: [requests, N] int64, written: the argmax of each row; ties go to the lowest id.
        num_emitted: [requests] int64, written: 1 + the number of leading offered drafts that are correct; 0 if
            inactive.
        logits: [requests, N, vocabulary] float32.
        draft_tokens: [requests, N - 1] int64, contiguous in the last dimension.
        active: [requests] bool.
        num_drafts: [requests] int64, the number of drafts that each offers; None for all.
    """
    assert draft_tokens.dtype is torch.int64 and draft_tokens.stride(1) == 1
    drafts = draft_tokens.data_ptr(), draft_tokens.stride(0)
    library().native_strict(tokens, num_emitted, logits, *drafts, active, num_drafts, *logits.shape)


def strict_accept(
    logits: torch.Tensor, draft_tokens: torch.Tensor, active: torch.Tensor, num_drafts: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens and their counts that `write_strict` writes."""
    tokens, num_emitted = empty_verdict(logits)
    write_strict(tokens, num_emitted, logits, draft_tokens, active, num_drafts)
    return tokens, num_emitted


@cpu_operator("native_catchup", mutates_args=("places",))
def write_places(
    places: torch.Tensor,
    kv_lens: torch.Tensor,
    num_emitted: torch.Tensor,
    pages: torch.Tensor,
    first: int,
    num_rows: int,
    page_size: int,
    num_positions: int,
) -> None:
    """Write the places of a catch-up step's rows, which begin `first` positions past L, and the places of the live row
    of each request.

    Args:
        places: one flat int64 tensor, written, with eight parts: positions and slots [requests, num_rows] and lengths
            [requests]; then, [requests] each, the positions, slots, lengths and flat indices of the live rows, and the
            committed lengths after this round (L + 1 if n is 0).
        kv_lens: [requests], the committed length L of each request.
        num_emitted: [requests], the number n of tokens that each request emitted. Row n - 1 is live, or row 0 if n is
            0.
        pages: [requests, num_pages], the last column scratch.
    """
    sizes = first, pages.shape[0], num_rows, pages.shape[1], page_size, num_positions
    library().native_catchup(places, kv_lens, num_emitted, pages, *sizes)


def catchup_places(
    kv_lens: torch.Tensor,
    num_emitted: torch.Tensor,
    pages: torch.Tensor,
    first: int,
    num_rows: int,
    page_size: int,
    num_positions: int,
) -> tuple[torch.Tensor, ...]:
    """Return the eight parts that `write_places` writes."""
    parts = [len(kv_lens) * num_rows] * 2 + [len(kv_lens)] * 6
    places = kv_lens.new_empty(sum(parts))
    write_places(places, kv_lens, num_emitted, pages, first, num_rows, page_size, num_positions)
    return places.split(parts)


@cpu_operator("native_commit", mutates_args=("kv_lens", "input_ids", "last"))
def commit_into(
    kv_lens: torch.Tensor,
    input_ids: torch.Tensor,
    last: torch.Tensor,
    slot_ids: torch.Tensor,
    tokens: torch.Tensor,
    num_emitted: torch.Tensor,
    draft_tokens: torch.Tensor,
) -> None:
    """Add `num_emitted` to the `kv_lens` of `slot_ids`, and write the last emitted token, then the drafts, to their
    `input_ids`. `last` [requests] becomes that token's index `num_emitted` - 1. If nothing was emitted, it is the token
    at index 0."""
    num_requests, width = slot_ids.shape[0], input_ids.shape[1]
    assert draft_tokens.dtype is torch.int64 and draft_tokens.shape == (num_requests, width - 1)
    drafts = draft_tokens.data_ptr(), *draft_tokens.stride()
    sizes = num_requests, tokens.shape[1], width
    library().native_commit(kv_lens, input_ids, last, slot_ids, tokens, num_emitted, *drafts, *sizes)


def commit_rows(
    kv_lens: torch.Tensor,
    input_ids: torch.Tensor,
    slot_ids: torch.Tensor,
    tokens: torch.Tensor,
    num_emitted: torch.Tensor,
    draft_tokens: torch.Tensor,
) -> torch.Tensor:
    """Do what `commit_into` does, and return `last`."""
    last = torch.empty_like(num_emitted)
    commit_into(kv_lens, input_ids, last, slot_ids, tokens, num_emitted, draft_tokens)
    return last


@cpu_operator("native_build", mutates_args=("positions", "slots", "lengths"))
def build_metadata(
    positions: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    wanted: torch.Tensor,
    keys: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
    num_positions: int,
) -> None:
    """Write the metadata of rows at positions `wanted` [requests, num_queries]. Each request has `keys` [requests]
    keys up to its last row.

    It writes `positions`, clamped, and `slots`, both [requests * num_queries], and `lengths`, at least 1. `pages` is
    [requests, num_pages]; the last column is scratch.
    """
    sizes = *wanted.shape, pages.shape[1], page_size, num_positions
    library().native_build(positions, slots, lengths, wanted, keys, pages, *sizes)


@cpu_operator("native_advance", mutates_args=("positions", "slots", "lengths"))
def advance_metadata(
    positions: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
    num_positions: int,
) -> None:
    """Advance the metadata of one row for each request by one position, in place."""
    library().native_advance(positions, slots, lengths, pages, *pages.shape, page_size, num_positions)


@cpu_operator("native_look_up", mutates_args=("drafts", "texts"))
def _look_up_into(
    drafts: torch.Tensor,
    texts: torch.Tensor,
    slot_ids: torch.Tensor,
    starts: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    max_ngram: int,
    min_ngram: int,
) -> None:
    assert tokens.dtype is torch.int64 and tokens.stride(1) == 1
    sizes = tokens.stride(0), drafts.shape[0], texts.shape[1], max_ngram, min_ngram, drafts.shape[1]
    library().native_look_up(drafts, texts, slot_ids, starts, tokens.data_ptr(), counts, *sizes)


def extend_and_look_up(
    texts: torch.Tensor,
    slot_ids: torch.Tensor,
    starts: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    max_ngram: int,
    min_ngram: int,
    num_draft_tokens: int,
) -> torch.Tensor:
    """Extend texts, and return drafts [batch, num_draft_tokens], as `spec_kernels.lookup` does."""
    drafts = slot_ids.new_empty((slot_ids.shape[0], num_draft_tokens))
    _look_up_into(drafts, texts, slot_ids, starts, tokens, counts, max_ngram, min_ngram)
    return drafts
