"""Vanilla MTP has a module with a KV cache for each draft (DeepSeek-V3, arXiv 2412.19437; TensorRT-LLM's `MTPWorker`).

Module i (from 0) reads the pairs (t[r+1], h[r]) with the target's hidden states, then for each earlier module the pair
(its draft, its output at the last row). It holds pair r at position r - i, as the source does, so that every module's
last row stands at P, the last position with a hidden state of the target, and sees P + 1 keys. The first i pairs of a
text have no place in it.

Where this differs from the source. There every module runs over the window's K rows, and drops the oldest pair for
each draft it is handed. So after K accepted drafts the position before the window is never written, in any module;
and after more than K - i emitted tokens module i keeps rows of the round before, which hold a draft's hidden state in
place of the target's. Here module i runs over N + i rows: the window, the pair that has just left it, and the drafts.
They start at or before the oldest such row, whatever n is, so that a module's cache depends on the text alone, not on
its rounds. The last K of them are the source's; the others only write KV.

A prompt's chunks need nothing of each other for the same reason: module i takes the chunk's pairs, i positions
further back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.protocols import AttentionBackend, DrafterRequirements, RowSelection
from spec_lab.core.pruning_protocols import PrunePolicy
from spec_lab.core.types import AttentionMetadata, DraftStep, FeatureSpec, PromptChunk, Request, VerifiedRound
from spec_lab.drafters.mtp_window import MtpRows, MtpWindow, pair_with_next, slide, with_room
from spec_lab.drafters.picking import DraftedRows, DraftHead, DraftPicker


class DraftModule(DraftHead, Protocol):
    """Is one MTP module: what `forward` returns goes on to the next module and is read by `greedy`."""

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        cache: LayerCache,
        attention: AttentionMetadata,
        selection: RowSelection,
    ) -> torch.Tensor:
        """Turn [rows] tokens t[p+1] and [rows, hidden_size] hidden states h[p] into the live rows' output, which has no
        row for an empty selection."""
        ...


RowPruning = Callable[[int, AttentionMetadata], RowSelection]
"""Chooses, from the rows a request and metadata of its last one, the rows that go on."""


@dataclass(slots=True)
class MtpVanillaState:
    """Holds the state that the next module goes on with.

    Attributes:
        tokens: [batch] the newest draft.
        rows: what the first module read, and room for the K - 1 pairs that drafts add, filled in place: a step that is
            captured alone finds them at one address.
        hidden: [batch, hidden_size] the last module's output at its last row.
        last_row: metadata of one query at P; nothing moves in a round, so there is no `attention` to advance.
        drafted: which requests draft.
        pruning: which rows of a module go on: of a prompt, or of a catch-up step.
    """

    tokens: torch.Tensor
    rows: MtpRows
    hidden: torch.Tensor
    last_row: AttentionMetadata
    drafted: DraftedRows
    pruning: RowPruning
    attention: AttentionMetadata | None = None


class MtpVanillaDrafter:
    """Drafts a token with each of `modules`; `caches` has the KV of each, in the target's slots."""

    def __init__(
        self,
        modules: Sequence[DraftModule],
        caches: Sequence[LayerCache],
        window: MtpWindow,
        features: FeatureSpec,
        backend: AttentionBackend,
        prune: PrunePolicy,
        picker: DraftPicker,
    ) -> None:
        assert len(modules) == len(caches) == window.size
        self.num_draft_tokens = len(modules)
        num_rows = self.num_draft_tokens + 1
        passes = tuple(num_rows + index for index in range(len(modules)))
        self.requirements = DrafterRequirements(features, catchup_rows=passes, distinct_steps=True)
        self.modules = modules
        self.caches = caches
        self.window = window
        self.backend = backend
        self.prune = prune
        self.picker = picker

    def admit(self, slot: int, request: Request) -> None:
        self.window.clear(slot)

    def ingest(self, chunk: PromptChunk) -> MtpVanillaState | None:
        """A chunk's pairs go to every module's cache; the drafts' rows are behind those of the last chunk."""
        assert chunk.features is not None
        drafted = DraftedRows.of_prompt(chunk)
        inputs = MtpRows(chunk.token_ids.unsqueeze(0), chunk.features.unsqueeze(0))
        self.window.slide(drafted.slot_ids, inputs, torch.full_like(drafted.slot_ids, chunk.num_rows))
        rows = MtpRows(chunk.next_token_ids.unsqueeze(0), inputs.hidden)
        pruning = self.prune.prompt.drafter_selection
        if chunk.live_attention is None:
            for index in range(self.num_draft_tokens):
                ends = chunk.attention.seq_lens - index
                self._forward(index, rows, ends, chunk.attention, pruning(chunk.num_rows, None))
            return None
        return self._start(rows, chunk.live_attention, drafted, pruning)

    def catch_up(self, verified: VerifiedRound) -> MtpVanillaState:
        """Run the first module over the N rows up to the last valid one; the window slides on by n.

        An inactive row stands in as n = 1 would (`Verification.num_live`), and leaves its window as it is.
        """
        assert verified.features is not None
        batch, emitted = verified.batch, verified.verification
        num_rows = self.num_draft_tokens + 1
        inputs = MtpRows(batch.input_ids, verified.features.view(*batch.input_ids.shape, -1))
        num_live = emitted.num_live
        newest = emitted.tokens.gather(1, num_live.unsqueeze(1) - 1).squeeze(1)
        rows = pair_with_next(slide(self.window.of(batch.slot_ids), inputs, num_live, num_rows), newest)
        self.window.slide(batch.slot_ids, inputs, emitted.num_emitted)
        ends = batch.kv_lens + num_live
        last_row = self.backend.build(
            positions=(ends - 1).unsqueeze(1),
            seq_lens=ends,
            page_table=batch.page_table,
            max_seq_len=batch.max_kv_len + num_rows,
        )
        return self._start(rows, last_row, DraftedRows(batch.slot_ids, ends), self._catchup_rows)

    def step(self, state: MtpVanillaState, step: DraftStep) -> None:
        num_rows = state.rows.num_rows - self.num_draft_tokens + 1 + step.index
        state.rows.put(num_rows - 1, state.tokens, state.hidden)
        state.hidden = self._output(step.index, state.rows.first(num_rows), state.last_row, state.pruning)
        state.tokens = self.picker.pick(self.modules[step.index], state.hidden, state.drafted, step.column)

    def kept_logits(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return self.picker.kept_logits(slot_ids)

    def _start(
        self, rows: MtpRows, last_row: AttentionMetadata, drafted: DraftedRows, pruning: RowPruning
    ) -> MtpVanillaState:
        hidden = self._output(0, rows, last_row, pruning)
        tokens = self.picker.first(self.modules[0], hidden, drafted)
        room = with_room(rows, self.num_draft_tokens - 1)
        return MtpVanillaState(tokens, room, hidden, last_row, drafted, pruning)

    def _catchup_rows(self, num_rows: int, last_row: AttentionMetadata) -> RowSelection:
        ends = torch.arange(1, last_row.seq_lens.shape[0] + 1, device=last_row.seq_lens.device) * num_rows
        return self.prune.catchup.selection(ends - 1, last_row)

    def _output(self, index: int, rows: MtpRows, last_row: AttentionMetadata, pruning: RowPruning) -> torch.Tensor:
        """Return the output [batch, hidden_size] of module `index` at the last of `rows`."""
        return self._forward(index, rows, last_row.seq_lens, last_row, pruning(rows.num_rows, last_row))

    def _forward(
        self, index: int, rows: MtpRows, ends: torch.Tensor, like: AttentionMetadata, selection: RowSelection
    ) -> torch.Tensor:
        """Run module `index` over `rows` at the positions before `ends` [batch], in the pages of `like`.

        Rows at negative positions, of a prompt shorter than K or before a module's first pair, are written to scratch.
        """
        positions = ends.unsqueeze(1) + torch.arange(-rows.num_rows, 0, device=ends.device)
        attention = self.backend.build(positions, ends, like.page_table, like.max_seq_len)
        return self.modules[index].forward(
            rows.tokens.flatten(), rows.hidden.flatten(0, 1), self.caches[index], attention, selection
        )
