"""Ragged forwards, whose requests have different numbers of rows: a sequence of even batches.

All requests of an even batch have the same number of rows. Products, norms and KV writes run once over all rows.
Attention and the scan of a recurrent layer run once for each even batch. So a backend attends to one even batch at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.prompts import LiveRows, PromptEnds, PromptPack, PromptSpan
from spec_lab.core.types import AttentionMetadata

KEYS_ALONE = 4096
"""A chunk that sees at least this many keys is an even batch of its own, since it fills a device by itself.

A backend may use another kernel for a single chunk (`spec_lab.attention.long_prompts`). A chunk that is always alone in
its even batch has the same bits, whatever is packed with it."""


@dataclass(frozen=True, slots=True)
class EvenBatch:
    """An even batch: its rows and its requests within the forward, and their metadata."""

    rows: slice
    requests: slice
    metadata: AttentionMetadata


def even_batches(metadata: AttentionMetadata) -> Iterator[EvenBatch]:
    """Yield the even batches of a forward; a forward that is not ragged is one even batch."""
    first_row = first_request = 0
    for batch in metadata.batches or (metadata,):
        rows = slice(first_row, first_row + batch.positions.shape[0])
        requests = slice(first_request, first_request + batch.seq_lens.shape[0])
        yield EvenBatch(rows, requests, batch)
        first_row, first_request = rows.stop, requests.stop


def in_even_batches(run: Callable[[EvenBatch], torch.Tensor], metadata: AttentionMetadata) -> torch.Tensor:
    """Call `run` for each even batch of a forward, and return its results concatenated, [rows, ...]."""
    outputs = [run(batch) for batch in even_batches(metadata)]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def build_metadata(
    backend: AttentionBackend, spans: Sequence[PromptSpan], page_table: torch.Tensor
) -> AttentionMetadata:
    """Make the metadata of the rows of `spans`, one span for each row of `page_table` [requests, num_pages + 1].

    Adjacent spans with the same positions form one even batch, unless they see `KEYS_ALONE` keys or more. Rows at
    negative positions write to the scratch page.
    """
    batches, first = [], 0
    for (start, end, _), alike in groupby(
        spans, lambda span: (span.start, span.end, span.slot if span.end >= KEYS_ALONE else None)
    ):
        num_requests = len(list(alike))
        pages = page_table[first : first + num_requests]
        positions = torch.arange(start, end, device=page_table.device).expand(num_requests, -1)
        seq_lens = torch.full((num_requests,), end, device=page_table.device)
        batch = backend.build(positions, seq_lens, pages, max(end, 1))
        batch.known_len = end
        batches.append(batch)
        first += num_requests
    return batches[0] if len(batches) == 1 else _joined(batches, page_table)


def _joined(batches: Sequence[AttentionMetadata], page_table: torch.Tensor) -> AttentionMetadata:
    return AttentionMetadata(
        positions=torch.cat([batch.positions for batch in batches]),
        slot_mapping=torch.cat([batch.slot_mapping for batch in batches]),
        seq_lens=torch.cat([batch.seq_lens for batch in batches]),
        page_table=page_table,
        num_queries=max(batch.num_queries for batch in batches),
        max_seq_len=max(batch.max_seq_len for batch in batches),
        batches=tuple(batches),
    )


def attend(
    backend: AttentionBackend,
    queries: torch.Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    window: int | None,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Call `AttentionBackend.attend` for each even batch of a forward, which may be ragged."""
    if not metadata.batches:
        return backend.attend(queries, cache, metadata, window, scale, sinks)
    return in_even_batches(
        lambda batch: backend.attend(queries[batch.rows], cache, batch.metadata, window, scale, sinks), metadata
    )


def whole_prompt(
    backend: AttentionBackend,
    page_table: torch.Tensor,
    token_ids: torch.Tensor,
    features: torch.Tensor | None,
    num_draft_tokens: int,
    slot: int = 0,
    start: int = 0,
) -> PromptPack:
    """Make the pack for a drafter to ingest one prompt, or the last chunk of one, without an engine.

    Args:
        page_table: [1, num_pages + 1].
        token_ids: [rows + 1] the chunk, and the token after the prompt.
        features: [rows, feature_size].
    """
    span = PromptSpan(slot, start, start + token_ids.shape[0] - 1, is_last=True)
    device = token_ids.device
    slot_ids, lengths = torch.tensor([slot], device=device), torch.tensor([span.end], device=device)
    last = (lengths - 1).unsqueeze(1)
    live_attention = backend.build(last, lengths.clone(), page_table, span.end + num_draft_tokens)
    live = LiveRows(torch.tensor([span.num_rows - 1], device=device), live_attention)
    ends = PromptEnds(slot_ids, lengths, token_ids[-1:], live, max_kv_len=span.end)
    attention = build_metadata(backend, (span,), page_table)
    return PromptPack(
        (span,), slot_ids, token_ids[:-1], token_ids[1:], features=features, attention=attention, ends=ends
    )
