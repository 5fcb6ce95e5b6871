"""P-EAGLE's catch-up step is its draft: one pass over what was emitted, and over a mask row for each further draft.

Row j < n of a request pairs t[L+j+1] with h[L+j], as a recurrent head's does. Mask rows stand behind, at the next
positions. So a request's rows are neighbours from L on, whatever n is, and causal attention hides from the K rows that
draft what lies behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from spec_lab.core.kv_cache import PagedKVCache
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.prompts import PromptEnds, PromptPack
from spec_lab.core.protocols import DrafterRequirements
from spec_lab.core.pruning_protocols import PrunePolicy
from spec_lab.core.types import AttentionMetadata, DraftStep, FeatureSpec, Request, VerifiedRound
from spec_lab.drafters.picking import DraftedRows, DraftPicker
from spec_lab.models.blocks.heads import at_column
from spec_lab.models.p_eagle import PEagleHead
from spec_lab.pruning.selection import AllRows


@dataclass(slots=True)
class PEagleState:
    """Holds the newest draft [batch], and logits [batch, K, draft vocabulary] of all."""

    tokens: torch.Tensor
    logits: torch.Tensor
    rows: DraftedRows
    attention: AttentionMetadata | None = None


class PEagleDrafter:
    """Keeps the protocol `Drafter`. Its KV cache has the target's slot numbering."""

    def __init__(
        self,
        num_draft_tokens: int,
        head: PEagleHead,
        features: FeatureSpec,
        cache: PagedKVCache,
        backend: AttentionBackend,
        prune: PrunePolicy,
        picker: DraftPicker,
    ) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.requirements = DrafterRequirements(
            features, catchup_rows=(2 * num_draft_tokens,), count_catchup=self._count_rows
        )
        self.head = head
        self.cache = cache
        self.backend = backend
        self.prune = prune
        self.picker = picker
        self._drafts = torch.arange(num_draft_tokens, device=cache.device)

    def admit(self, slot: int, request: Request) -> None:
        """Do nothing: rows past a slot's length are never read."""

    def ingest(self, pack: PromptPack) -> PEagleState | None:
        """Run the rows of stretches of prompts, and K - 1 mask rows behind each prompt that ends there."""
        assert pack.features is not None
        ends = pack.ends
        selection = self.prune.prompt.drafter_selection(None if ends is None else ends.live)
        fused = self.head.fuse(pack.features)
        hidden = self.head.forward(pack.next_token_ids, fused, self.cache, pack.attention, selection)
        if ends is None:
            return None
        return self._begin(torch.cat((hidden.unsqueeze(1), self._masks(ends)), dim=1), DraftedRows.of_prompts(ends))

    def catch_up(self, verified: VerifiedRound) -> PEagleState:
        """Run n rows of each request, and mask rows behind them up to N + K - 1; the K rows from n - 1 on draft."""
        assert verified.features is not None
        batch, emitted = verified.batch, verified.verification
        num_requests, num_verified = emitted.tokens.shape
        num_masks = self.num_draft_tokens - 1
        num_rows = num_verified + num_masks
        is_emitted = torch.arange(num_rows, device=batch.kv_lens.device) < emitted.num_live.unsqueeze(1)
        tokens = torch.where(is_emitted, F.pad(emitted.tokens, (0, num_masks)), self.head.mask_token_id)
        fused = self.head.fuse(verified.features).view(num_requests, num_verified, -1)
        fused = torch.where(is_emitted.unsqueeze(2), F.pad(fused, (0, 0, 0, num_masks)), self.head.mask_features)
        attention = self._rows(batch.kv_lens, num_rows, batch.page_table, batch.max_kv_len)
        first = batch.kv_lens + emitted.num_live - 1
        drafting = self._rows(first, self.num_draft_tokens, batch.page_table, batch.max_kv_len + num_verified)
        first_rows = torch.arange(num_requests, device=first.device) * num_rows + emitted.num_live - 1
        live_rows = (first_rows.unsqueeze(1) + self._drafts).flatten()
        selection = self.prune.catchup.selection(live_rows, drafting)
        hidden = self.head.forward(tokens.flatten(), fused.flatten(0, 1), self.cache, attention, selection)
        return self._begin(hidden.unflatten(0, (num_requests, -1)), DraftedRows(batch.slot_ids, first + 1))

    def step(self, state: PEagleState, step: DraftStep) -> None:
        """Pick the next draft, which does not depend on the one before it."""
        scores = self.head.scored(at_column(state.logits, step.column))
        state.tokens = self.picker.pick(scores, state.logits, state.rows, step.column)

    def kept_logits(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return self.picker.kept_logits(slot_ids)

    def _masks(self, ends: PromptEnds) -> torch.Tensor:
        """Run the mask rows behind prompts: [ended, K - 1, hidden_size]."""
        num_requests, num_masks = ends.slot_ids.shape[0], self.num_draft_tokens - 1
        features = self.head.mask_features.expand(num_requests * num_masks, -1)
        if not num_masks:
            return features.view(num_requests, 0, features.shape[1])
        attention = self._rows(ends.kv_lens, num_masks, ends.live.attention.page_table, ends.max_kv_len)
        tokens = ends.tokens.new_full((num_requests * num_masks,), self.head.mask_token_id)
        hidden = self.head.forward(tokens, features, self.cache, attention, AllRows())
        return hidden.view(num_requests, num_masks, -1)

    def _rows(self, first: torch.Tensor, num_rows: int, page_table: torch.Tensor, max_first: int) -> AttentionMetadata:
        """Make the metadata of rows in a row from the positions `first` [batch] on."""
        positions = first.unsqueeze(1) + torch.arange(num_rows, device=first.device)
        return self.backend.build(positions, first + num_rows, page_table, max_first + num_rows)

    def _begin(self, hidden: torch.Tensor, rows: DraftedRows) -> PEagleState:
        """Draft from [batch, K, hidden_size]."""
        logits = self.head.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
        scores = self.head.scored(logits[:, 0])
        return PEagleState(self.picker.first(scores, logits, rows), logits, rows)

    def _count_rows(self, num_emitted: Sequence[int], num_verified: int) -> int:
        """Count the rows of a catch-up step behind its KV writes."""
        most = self.num_draft_tokens
        return len(num_emitted) * (most if self.prune.catchup.drops_rows else num_verified + most - 1)
