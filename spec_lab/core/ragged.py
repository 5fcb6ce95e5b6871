"""Forwards whose requests differ in their number of rows: they are a row of even batches, each of which attends alone.

Products, norms and KV writes take all rows at once, which is most of a forward's work; what works request by request
(attention, the scan of a recurrent layer) is called for every even batch. So a backend knows even batches only.
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
"""A chunk that sees so many keys attends alone: it fills a device, and a backend may have another kernel for one chunk
(`spec_lab.attention.long_prompts`). So its bits are the same in every pack."""


@dataclass(frozen=True, slots=True)
class EvenBatch:
    """An even batch of a forward: which of its rows, which of its requests, and their metadata."""

    rows: slice
    requests: slice
    metadata: AttentionMetadata


def even_batches(metadata: AttentionMetadata) -> Iterator[EvenBatch]:
    """Yield the even batches of a forward, which is one itself where it has no others."""
    first_row = first_request = 0
    for batch in metadata.batches or (metadata,):
        rows = slice(first_row, first_row + batch.positions.shape[0])
        requests = slice(first_request, first_request + batch.seq_lens.shape[0])
        yield EvenBatch(rows, requests, batch)
        first_row, first_request = rows.stop, requests.stop


def in_even_batches(run: Callable[[EvenBatch], torch.Tensor], metadata: AttentionMetadata) -> torch.Tensor:
    """Call `run` for each even batch of a forward, and return the rows that it gave, [rows, ...]."""
    outputs = [run(batch) for batch in even_batches(metadata)]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def build_metadata(
    backend: AttentionBackend, spans: Sequence[PromptSpan], page_table: torch.Tensor
) -> AttentionMetadata:
    """Make the metadata of the rows of `spans`, whose pages are the rows of `page_table` [requests, num_pages + 1].

    Neighbours with the same positions are one even batch, unless they see `KEYS_ALONE`. Rows at negative positions are
    written to scratch.
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
) -> torch.Tensor:
    """Do what `AttentionBackend.attend` does, for requests that may differ in their number of rows."""
    if not metadata.batches:
        return backend.attend(queries, cache, metadata, window, scale)
    return in_even_batches(
        lambda batch: backend.attend(queries[batch.rows], cache, batch.metadata, window, scale), metadata
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
    """Make what a drafter ingests of one prompt in one chunk, or of its last chunk, outside of an engine.

    Args:
        page_table: [1, num_pages + 1].
        token_ids: [rows + 1] the chunk, and the token behind the prompt.
        features: [rows, feature_size].
    """
    span = PromptSpan(slot, start, start + token_ids.shape[0] - 1, is_last=True)
    device = token_ids.device
    slot_ids, lengths = torch.tensor([slot], device=device), torch.tensor([span.end], device=device)
    last = (lengths - 1).unsqueeze(1)
    live_attention = backend.build(last, lengths.clone(), page_table, span.end + num_draft_tokens)
    live = LiveRows(torch.tensor([span.num_rows - 1], device=device), live_attention)
    ends = PromptEnds(slot_ids, lengths, token_ids[-1:], live, span.end)
    attention = build_metadata(backend, (span,), page_table)
    return PromptPack((span,), slot_ids, token_ids[:-1], token_ids[1:], features, attention, ends)
