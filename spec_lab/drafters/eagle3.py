"""EAGLE-3: catch-up over the N verified rows with the target's features, then one row a step on its own output."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_lab.core.protocols import AttentionBackend, DrafterRequirements, PrunePolicy
from spec_lab.core.types import AttentionMetadata, FeatureSpec, PromptChunk, Request, VerifiedRound
from spec_lab.drafters.picking import DraftedRows, DraftPicker
from spec_lab.engine.kv_cache import LayerCache
from spec_lab.models.eagle3 import Eagle3Head
from spec_lab.pruning.selection import AllRows


@dataclass(slots=True)
class Eagle3State:
    """tokens [batch]; hidden [batch, hidden_size] to feed back; attention: one-row metadata, advanced in place."""

    tokens: torch.Tensor
    hidden: torch.Tensor
    attention: AttentionMetadata
    rows: DraftedRows


class Eagle3Drafter:
    """See `Drafter`. Its KV cache has the target's slot numbering: a row writes its position's slot."""

    def __init__(
        self,
        num_draft_tokens: int,
        head: Eagle3Head,
        tap_layer_inputs: tuple[int, ...],
        cache: LayerCache,
        backend: AttentionBackend,
        prune: PrunePolicy,
        picker: DraftPicker,
    ) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.requirements = DrafterRequirements(features=FeatureSpec(layer_inputs=tap_layer_inputs), catches_up=True)
        self._head = head
        self._cache = cache
        self._backend = backend
        self._prune = prune
        self._picker = picker

    def admit(self, slot: int, request: Request) -> None:
        """Nothing to clear: rows past a slot's length are never read."""

    def ingest(self, chunk: PromptChunk) -> Eagle3State | None:
        assert chunk.features is not None
        selection = self._prune.prompt.drafter_selection(chunk.num_rows, chunk.live_attention)
        fused = self._head.fuse(chunk.features)
        hidden = self._head.forward(chunk.next_token_ids, fused, self._cache, chunk.attention, selection)
        if chunk.live_attention is None:
            return None
        assert hidden is not None
        device = chunk.next_token_ids.device
        kv_lens = torch.tensor([chunk.start + chunk.num_rows], device=device)
        return self._start(
            hidden, chunk.live_attention, DraftedRows(torch.tensor([chunk.slot], device=device), kv_lens)
        )

    def seed(self, verified: VerifiedRound) -> Eagle3State:
        """Catch-up: rows at L..L+K with the emitted tokens; the live row is n - 1, and sees L + n keys."""
        assert verified.features is not None
        batch, emitted = verified.batch, verified.verification
        num_rows = emitted.tokens.shape[1]
        offsets = torch.arange(num_rows, device=batch.kv_lens.device)
        attention = self._backend.build(
            positions=batch.kv_lens.unsqueeze(1) + offsets,
            seq_lens=batch.kv_lens + num_rows,
            page_table=batch.page_table,
            max_seq_len=batch.max_kv_len + num_rows,
        )
        live_lens = batch.kv_lens + emitted.num_emitted
        live_attention = self._backend.build(
            positions=(live_lens - 1).unsqueeze(1),
            seq_lens=live_lens,
            page_table=batch.page_table,
            max_seq_len=batch.max_kv_len + num_rows + self.num_draft_tokens - 1,
        )
        first_rows = torch.arange(batch.num_rows, device=live_lens.device) * num_rows
        live_rows = first_rows + (emitted.num_emitted - 1).clamp(min=0)
        selection = self._prune.catchup.selection(live_rows, live_attention)
        fused = self._head.fuse(verified.features)
        hidden = self._head.forward(emitted.tokens.reshape(-1), fused, self._cache, attention, selection)
        assert hidden is not None
        return self._start(hidden, live_attention, DraftedRows(batch.slot_ids, live_lens))

    def kept_logits(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return self._picker.kept_logits(slot_ids)

    def step(self, state: Eagle3State, index: int) -> None:
        self._backend.advance(state.attention)
        hidden = self._head.forward(state.tokens, state.hidden, self._cache, state.attention, AllRows())
        assert hidden is not None
        state.hidden = hidden
        state.tokens = self._picker.pick(self._head, hidden, state.rows, index)

    def _start(self, hidden: torch.Tensor, attention: AttentionMetadata, rows: DraftedRows) -> Eagle3State:
        return Eagle3State(self._picker.pick(self._head, hidden, rows, 0), hidden, attention, rows)
