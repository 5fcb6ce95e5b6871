"""P-EAGLE: one pass over the emitted tokens and K - 1 mask rows is both the catch-up step and the draft.

Row j < n of a request takes the pair of t[L+j+1] and h[L+j], like a recurrent head. Mask rows follow at the next
positions. So a request's rows have consecutive positions from L on, whatever n is. Causal attention hides later rows
from the K rows that draft.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from spec_lab.core.kept import PrunePolicy
from spec_lab.core.kv_cache import PagedKVCache
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.passes import Pass
from spec_lab.core.prompts import PromptEnds, PromptPack
from spec_lab.core.protocols import DrafterRequirements
from spec_lab.core.rows import rows_at
from spec_lab.core.types import AttentionMetadata, FeatureSpec, VerifiedRound
from spec_lab.drafters.block import RunBlock
from spec_lab.drafters.picking import DraftedRows
from spec_lab.models.blocks.heads import BlockHead, BlockRows, IndependentSlots
from spec_lab.models.p_eagle import PEagleHead


class PEaglePass:
    """The pass of P-EAGLE, which drafts all slots at once. Its KV cache uses the target's slot numbering."""

    def __init__(
        self,
        num_draft_tokens: int,
        head: PEagleHead,
        features: FeatureSpec,
        cache: PagedKVCache,
        backend: AttentionBackend,
        prune: PrunePolicy,
    ) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.requirements = DrafterRequirements(features, catchup_rows=(2 * num_draft_tokens,), counts_catchup=True)
        self.model = head
        self.head: BlockHead = IndependentSlots(head.scored)
        self.cache = cache
        self.backend = backend
        self.prune = prune
        self._drafts = torch.arange(num_draft_tokens, device=cache.device)

    def of_prompts(self, pack: PromptPack) -> RunBlock | None:
        """Run the rows of prompt chunks, and K - 1 mask rows after each prompt that ends."""
        assert pack.features is not None
        ends = pack.ends
        kept = self.prune.prompt.in_drafter(None if ends is None else ends.live)
        fused = self.model.fuse(pack.features)
        hidden = self.model.forward(pack.next_token_ids, fused, Pass(self.cache, pack.attention, kept))
        if ends is None:
            return None
        slots = torch.cat((hidden.unsqueeze(1), self._masks(ends)), dim=1)
        return self._slots(slots, ends.tokens, DraftedRows.of_prompts(ends))

    def of_round(self, verified: VerifiedRound) -> RunBlock:
        """Run n rows of each request and then mask rows, in all N + K - 1. The K rows from n - 1 on draft."""
        assert verified.features is not None
        batch, emitted = verified.batch, verified.verification
        num_requests, num_verified = emitted.tokens.shape
        num_masks = self.num_draft_tokens - 1
        num_rows = num_verified + num_masks
        is_emitted = torch.arange(num_rows, device=batch.kv_lens.device) < emitted.num_live.unsqueeze(1)
        tokens = torch.where(is_emitted, F.pad(emitted.tokens, (0, num_masks)), self.model.mask_token_id)
        fused = self.model.fuse(verified.features).view(num_requests, num_verified, -1)
        fused = torch.where(is_emitted.unsqueeze(2), F.pad(fused, (0, 0, 0, num_masks)), self.model.mask_features)
        attention = self._rows(batch.kv_lens, num_rows, batch.page_table, batch.max_kv_len)
        first = batch.kv_lens + emitted.num_live - 1
        drafting = self._rows(first, self.num_draft_tokens, batch.page_table, batch.max_kv_len + num_verified)
        first_rows = torch.arange(num_requests, device=first.device) * num_rows + emitted.num_live - 1
        live_rows = (first_rows.unsqueeze(1) + self._drafts).flatten()
        kept = self.prune.of_catchup(live_rows, drafting)
        hidden = self.model.forward(tokens.flatten(), fused.flatten(0, 1), Pass(self.cache, attention, kept))
        pending = rows_at(tokens.flatten(), first_rows)
        return self._slots(hidden.unflatten(0, (num_requests, -1)), pending, DraftedRows(batch.slot_ids, first + 1))

    def _masks(self, ends: PromptEnds) -> torch.Tensor:
        """Run the mask rows after prompts, and return their output [ended, K - 1, hidden_size]."""
        num_requests, num_masks = ends.slot_ids.shape[0], self.num_draft_tokens - 1
        features = self.model.mask_features.expand(num_requests * num_masks, -1)
        if not num_masks:
            return features.view(num_requests, 0, features.shape[1])
        attention = self._rows(ends.kv_lens, num_masks, ends.live.attention.page_table, ends.max_kv_len)
        tokens = ends.tokens.new_full((num_requests * num_masks,), self.model.mask_token_id)
        hidden = self.model.forward(tokens, features, Pass(self.cache, attention))
        return hidden.view(num_requests, num_masks, -1)

    def _rows(self, first: torch.Tensor, num_rows: int, page_table: torch.Tensor, max_first: int) -> AttentionMetadata:
        """Make the metadata of `num_rows` consecutive rows from the positions `first` [batch] on."""
        positions = first.unsqueeze(1) + torch.arange(num_rows, device=first.device)
        return self.backend.build(positions, first + num_rows, page_table, max_first + num_rows)

    def _slots(self, hidden: torch.Tensor, pending: torch.Tensor, rows: DraftedRows) -> RunBlock:
        """Make the block of the slots' outputs `hidden` [batch, K, hidden_size]."""
        logits = self.model.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
        return RunBlock(BlockRows(hidden, logits, hidden[:, 0]), pending, rows)

    def count_catchup(self, num_requests: int, num_live: int, num_verified: int) -> int:
        """Count the rows of a catch-up step that are computed after its KV writes."""
        most = self.num_draft_tokens
        return num_requests * (most if self.prune.catchup(num_requests).is_inside else num_verified + most - 1)
