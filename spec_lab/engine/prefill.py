"""The prompt pass: runs chunks of prompts through target and drafter, samples the first tokens, and drafts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from spec_lab.core.kept import PrunePolicy
from spec_lab.core.passes import Pass
from spec_lab.core.prompts import NOT_SAMPLED, LiveRows, PromptEnds, PromptPack, PromptRounding, PromptSpan
from spec_lab.core.ragged import build_metadata, even_batches
from spec_lab.core.results import RowCounts
from spec_lab.core.types import AttentionMetadata, Sequence
from spec_lab.engine.round import DecodeRound


@dataclass(eq=False)
class PromptPass:
    """Runs a chunk of each of one or several prompts in a forward. Prompt rows and verify rows never share a forward.

    Attributes:
        chunk_size: the most rows of one prompt in a forward.
        pack_size: the most rows of several prompts; a longer chunk runs alone. None for one prompt at a time.
        rounding: how a prompt's rows get bits that do not depend on other rows of the forward, if that is promised.
    """

    round: DecodeRound
    prune: PrunePolicy
    chunk_size: int
    pack_size: int | None
    rounding: PromptRounding

    def prepare(self) -> None:
        """Do nothing: there is nothing to capture."""

    def packs(self, sequences: Iterable[Sequence]) -> Iterator[list[Sequence]]:
        """Group `sequences`, in their order, so that the next chunks of each group share a forward."""
        pack: list[Sequence] = []
        num_rows = 0
        for sequence in sequences:
            num_more = self._next_chunk(sequence).num_rows
            if pack and (self.pack_size is None or num_rows + num_more > self.pack_size):
                yield pack
                pack, num_rows = [], 0
            pack.append(sequence)
            num_rows += num_more
        if pack:
            yield pack

    def run(self, sequences: Iterable[Sequence]) -> dict[int, RowCounts]:
        """Run the next chunk of each in one forward, and return what was computed for each, by slot.

        After a prompt's last chunk the sampled token is appended, and the slot is ready for decode rounds.
        """
        # Chunks at the same positions become adjacent, so that they attend together.
        chunks = sorted(
            ((self._next_chunk(sequence), sequence) for sequence in sequences),
            key=lambda chunk: (chunk[0].start, chunk[0].end),
        )
        spans, ordered = tuple(span for span, _ in chunks), [sequence for _, sequence in chunks]
        pack = self._pack(spans, ordered)
        computed = self.forward(pack)
        for span, sequence in chunks:
            sequence.num_prefilled = sequence.kv_len = span.end
        if pack.ends is not None:
            ended = [sequence for span, sequence in chunks if span.is_last]
            for sequence, token in zip(ended, pack.ends.tokens.tolist(), strict=True):
                sequence.tokens.append(token)
        return {span.slot: computed.of(span) for span in spans}

    def forward(self, pack: PromptPack) -> RowsComputed:
        """Run target and drafter over the rows of `pack`, sample a token for each prompt that ends in them, and draft.

        All effects on slots and caches happen on the device, so a graph can hold them.
        """
        with self.rounding.products():
            state, computed = self._forward(pack)
        if pack.ends is not None:
            self.round.start(pack.ends, state)
        return computed

    def _forward(self, pack: PromptPack) -> tuple[Any, RowsComputed]:
        parts, ends = self.round.parts, pack.ends
        live = None if ends is None else ends.live
        features = parts.drafter.requirements.features
        kept = self.prune.prompt.in_target(live, features)
        output = parts.target.forward(pack.token_ids, Pass(parts.cache, pack.attention, kept), features)
        hidden = self.prune.prompt.logit_rows(output.hidden, live)
        logits = parts.target.logits(hidden) if hidden.shape[0] else None
        if ends is not None:
            assert logits is not None
            ends.tokens = parts.rule.first_tokens(ends.live.of(logits), ends.slot_ids, ends.kv_lens)
            pack.next_token_ids.index_copy_(0, ends.live.rows, ends.tokens)
        pack.features = output.features
        num_features = 0 if output.features is None else output.features.shape[0]
        num_rows, num_kept = pack.token_ids.shape[0], output.hidden.shape[0]
        computed = RowsComputed(
            num_rows=num_rows,
            kept=num_kept,
            features=num_features,
            logits=hidden.shape[0],
            shared=output.num_shared_rows,
        )
        return parts.drafter.ingest(pack), computed

    def _next_chunk(self, sequence: Sequence) -> PromptSpan:
        start, length = sequence.num_prefilled, len(sequence.request.prompt_ids)
        end = min(start + self.chunk_size, length)
        return PromptSpan(sequence.slot, start, end, is_last=end == length)

    def _pack(self, spans: tuple[PromptSpan, ...], sequences: Iterable[Sequence]) -> PromptPack:
        """Lay out the rows of `spans` and the padding rows, and make their metadata."""
        slots = self.round.parts.slots
        device = slots.kv_lens.device
        filling = self.rounding.filling(spans, slots.table.scratch_slot)
        prompts = [sequence.request.prompt_ids for sequence in sequences]
        own = [token for span, prompt in zip(spans, prompts, strict=True) for token in prompt[span.start : span.end]]
        # A prompt's last row has a placeholder here, until the sampled token replaces it.
        following = [
            token
            for span, prompt in zip(spans, prompts, strict=True)
            for token in (*prompt[span.start + 1 : span.end + 1], *([0] if span.is_last else []))
        ]
        unread = [0] * sum(span.num_rows for span in filling)
        own, following, spans = [*own, *unread], [*following, *unread], (*spans, *filling)
        slot_ids = torch.tensor([span.slot for span in spans], device=device)
        token_ids, next_token_ids = torch.tensor([own, following], device=device).unbind(0)
        attention, ends = self._attention(spans, slot_ids), self._ends(spans, slot_ids)
        return PromptPack(spans, slot_ids, token_ids, next_token_ids, features=None, attention=attention, ends=ends)

    def _attention(self, spans: tuple[PromptSpan, ...], slot_ids: torch.Tensor) -> AttentionMetadata:
        slots = self.round.parts.slots
        attention = build_metadata(self.round.parts.backend, spans, slots.table.pages.index_select(0, slot_ids))
        for batch in even_batches(attention):
            batch.metadata.recurrent = slots.states.of_prompts(slot_ids[batch.requests])
        return attention

    def _ends(self, spans: tuple[PromptSpan, ...], slot_ids: torch.Tensor) -> PromptEnds | None:
        """Find the prompts that end in `spans`, and make metadata of one query at the last position of each."""
        ended = [index for index, span in enumerate(spans) if span.is_last]
        if not ended:
            return None
        parts, device = self.round.parts, slot_ids.device
        row_ends = list(accumulate(span.num_rows for span in spans))
        rows, lengths, indices = torch.tensor(
            [[row_ends[index] - 1 for index in ended], [spans[index].end for index in ended], ended], device=device
        ).unbind(0)
        longest = max(spans[index].end for index in ended)
        slots = slot_ids.index_select(0, indices)
        attention = parts.backend.build(
            positions=(lengths - 1).unsqueeze(1),
            seq_lens=lengths.clone(),
            page_table=parts.slots.table.pages.index_select(0, slots),
            max_seq_len=longest + parts.drafter.num_draft_tokens,
        )
        live = LiveRows(rows, attention, self.rounding.is_promised)
        return PromptEnds(slots, lengths, NOT_SAMPLED, live, max_kv_len=longest)


@dataclass(frozen=True, slots=True)
class RowsComputed:
    """The rows of a forward: all, and those that the target carried past its last KV write, for which it returned
    features and computed logits, and that entered layers which only read KV. Each is all rows, the live rows or none.
    """

    num_rows: int
    kept: int
    features: int
    logits: int
    shared: int

    def of(self, span: PromptSpan) -> RowCounts:
        """Count the rows of one request."""

        def own(count: int) -> int:
            return span.num_rows if count == self.num_rows else int(span.is_last and count > 0)

        return RowCounts(
            prefill_computed=own(self.kept),
            prefill_hidden=own(self.features),
            prefill_logits=own(self.logits),
            prefill_shared=own(self.shared),
        )
