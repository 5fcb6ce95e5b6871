"""The prompt pass runs chunks of a prompt through target and drafter, then samples the first token and drafts."""

from __future__ import annotations

import torch

from spec_lab.core.pruning_protocols import PrunePolicy
from spec_lab.core.results import RowCounts
from spec_lab.core.types import AttentionMetadata, PromptChunk, Sequence
from spec_lab.engine.round import DecodeRound


class PromptPass:
    """Runs one chunk of one prompt at a time; prompt rows and verify rows never share a forward."""

    def __init__(self, decode_round: DecodeRound, prune: PrunePolicy, chunk_size: int) -> None:
        self._round = decode_round
        self._parts = decode_round.parts
        self._prune = prune
        self.chunk_size = chunk_size

    def run_chunk(self, sequence: Sequence) -> RowCounts:
        """Run the next chunk; after the last one the sampled token is appended and the slot is ready for rounds."""
        prompt = sequence.request.prompt_ids
        start = sequence.num_prefilled
        end = min(start + self.chunk_size, len(prompt))
        is_last = end == len(prompt)
        attention, live_attention = self._attention(sequence.slot, start, end, is_last)
        ids = torch.tensor(prompt[start:end], dtype=torch.int64, device=attention.positions.device)
        sampled, features, counts = self._run_target(sequence.slot, ids, end, attention, live_attention)
        following = torch.tensor(prompt[start + 1 : end + 1], dtype=torch.int64, device=ids.device)
        next_token_ids = torch.cat((following, sampled))
        chunk = PromptChunk(sequence.slot, start, ids, next_token_ids, features, attention, live_attention)
        state = self._parts.drafter.ingest(chunk)
        sequence.num_prefilled = sequence.kv_len = end
        if is_last:
            assert state is not None
            self._round.start(sequence.slot, end, sampled, state)
            sequence.tokens.append(int(sampled))
        return counts

    def _attention(
        self, slot: int, start: int, end: int, is_last: bool
    ) -> tuple[AttentionMetadata, AttentionMetadata | None]:
        """Build the metadata of the chunk's rows, and on the last chunk of one query at its last position."""
        parts = self._parts
        page_table = parts.slots.table.pages[slot : slot + 1]
        seq_lens = torch.tensor([end], device=page_table.device)
        positions = torch.arange(start, end, device=page_table.device).unsqueeze(0)
        attention = parts.backend.build(positions, seq_lens, page_table, end)
        attention.recurrent = parts.slots.states.of_prompt(slot)
        if not is_last:
            return attention, None
        max_draft_len = end + parts.drafter.num_draft_tokens
        return attention, parts.backend.build(positions[:, -1:], seq_lens.clone(), page_table, max_draft_len)

    def _run_target(
        self,
        slot: int,
        token_ids: torch.Tensor,
        end: int,
        attention: AttentionMetadata,
        live_attention: AttentionMetadata | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, RowCounts]:
        """Return the sampled token [1] ([0] before the last chunk), the drafter's features, and what was computed."""
        parts = self._parts
        features = parts.drafter.requirements.features
        selection = self._prune.prompt.target_selection(token_ids.shape[0], live_attention, features)
        output = parts.target.forward(token_ids, parts.cache, attention, selection, features)
        rows = self._prune.prompt.logit_rows(output.hidden, live_attention is not None)
        counts = RowCounts(prefill_logits=rows.shape[0], prefill_shared=output.num_shared_rows)
        if output.features is not None:
            counts.prefill_hidden = output.features.shape[0]
        logits = parts.target.logits(rows) if rows.shape[0] else None
        if live_attention is None:
            return token_ids[:0], output.features, counts
        assert logits is not None
        return parts.rule.first_token(logits[-1:], slot, end), output.features, counts
