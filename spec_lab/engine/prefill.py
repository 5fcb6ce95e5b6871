"""The prompt pass runs chunks of prompts through target and drafter, then samples first tokens and drafts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

import torch

from spec_lab.core.prompts import LiveRows, PromptEnds, PromptPack, PromptSpan
from spec_lab.core.pruning_protocols import PrunePolicy
from spec_lab.core.ragged import build_metadata, even_batches
from spec_lab.core.results import RowCounts
from spec_lab.core.types import AttentionMetadata, Sequence, TargetOutput
from spec_lab.engine.round import DecodeRound


class PromptPass:
    """Runs one chunk of each of several prompts in a forward; prompt rows and verify rows never share one.

    Attributes:
        chunk_size: the most rows of one prompt in a forward.
        pack_size: the most rows of several; a chunk that is longer runs alone. None is one prompt at a time.
    """

    def __init__(
        self, decode_round: DecodeRound, prune: PrunePolicy, chunk_size: int, pack_size: int | None = None
    ) -> None:
        self._round = decode_round
        self._parts = decode_round.parts
        self._prune = prune
        self.chunk_size = chunk_size
        self.pack_size = pack_size

    def packs(self, sequences: Iterable[Sequence]) -> Iterator[list[Sequence]]:
        """Yield `sequences`, in their order, in groups whose next chunks share a forward."""
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

        Behind a prompt's last chunk the sampled token is appended, and the slot is ready for rounds.
        """
        # Chunks at the same positions are neighbours, so that they attend together.
        chunks = sorted(
            ((self._next_chunk(sequence), sequence) for sequence in sequences),
            key=lambda chunk: (chunk[0].start, chunk[0].end),
        )
        spans, ordered = tuple(span for span, _ in chunks), [sequence for _, sequence in chunks]
        pack, counts = self._run_target(spans, ordered)
        state = self._parts.drafter.ingest(pack)
        for span, sequence in chunks:
            sequence.num_prefilled = sequence.kv_len = span.end
        if pack.ends is not None:
            assert state is not None
            self._round.start(pack.ends, state)
            ended = [sequence for span, sequence in chunks if span.is_last]
            for sequence, token in zip(ended, pack.ends.tokens.tolist(), strict=True):
                sequence.tokens.append(token)
        return {span.slot: rows for span, rows in zip(spans, counts, strict=True)}

    def _next_chunk(self, sequence: Sequence) -> PromptSpan:
        start, length = sequence.num_prefilled, len(sequence.request.prompt_ids)
        end = min(start + self.chunk_size, length)
        return PromptSpan(sequence.slot, start, end, is_last=end == length)

    def _run_target(
        self, spans: tuple[PromptSpan, ...], sequences: Iterable[Sequence]
    ) -> tuple[PromptPack, list[RowCounts]]:
        """Run the target over the rows of `spans`, and sample the first token of each prompt that ends in them."""
        parts = self._parts
        device = parts.slots.kv_lens.device
        prompts = [sequence.request.prompt_ids for sequence in sequences]
        own = [token for span, prompt in zip(spans, prompts, strict=True) for token in prompt[span.start : span.end]]
        # Behind a prompt's end stands any token, until the sampled one takes its place.
        following = [
            token
            for span, prompt in zip(spans, prompts, strict=True)
            for token in (*prompt[span.start + 1 : span.end + 1], *([0] if span.is_last else []))
        ]
        slot_ids = torch.tensor([span.slot for span in spans], device=device)
        token_ids, next_token_ids = torch.tensor([own, following], device=device).unbind(0)
        attention = self._attention(spans, slot_ids)
        live = self._live_rows(spans, slot_ids)
        features = parts.drafter.requirements.features
        selection = self._prune.prompt.target_selection(live, features)
        output = parts.target.forward(token_ids, parts.cache, attention, selection, features)
        rows = self._prune.prompt.logit_rows(output.hidden, live)
        logits = parts.target.logits(rows) if rows.shape[0] else None
        ends = None
        if live is not None:
            assert logits is not None
            ends = self._sample(spans, live, live.of(logits))
            next_token_ids.index_copy_(0, live.rows, ends.tokens)
        pack = PromptPack(spans, slot_ids, token_ids, next_token_ids, output.features, attention, ends)
        return pack, _count_rows(spans, rows.shape[0], output)

    def _attention(self, spans: tuple[PromptSpan, ...], slot_ids: torch.Tensor) -> AttentionMetadata:
        slots = self._parts.slots
        attention = build_metadata(self._parts.backend, spans, slots.table.pages.index_select(0, slot_ids))
        for batch in even_batches(attention):
            batch.metadata.recurrent = slots.states.of_prompts(slot_ids[batch.requests])
        return attention

    def _live_rows(self, spans: tuple[PromptSpan, ...], slot_ids: torch.Tensor) -> LiveRows | None:
        """Find the last rows of the prompts that end in `spans`, and make their metadata, a query at the end of
        each."""
        ended = [index for index, span in enumerate(spans) if span.is_last]
        if not ended:
            return None
        parts, device = self._parts, slot_ids.device
        row_ends = list(accumulate(span.num_rows for span in spans))
        rows, lengths = torch.tensor(
            [[row_ends[index] - 1 for index in ended], [spans[index].end for index in ended]], device=device
        ).unbind(0)
        attention = parts.backend.build(
            positions=(lengths - 1).unsqueeze(1),
            seq_lens=lengths.clone(),
            page_table=parts.slots.table.pages.index_select(0, slot_ids[torch.tensor(ended, device=device)]),
            max_seq_len=_longest_end(spans) + parts.drafter.num_draft_tokens,
        )
        return LiveRows(rows, attention)

    def _sample(self, spans: tuple[PromptSpan, ...], live: LiveRows, logits: torch.Tensor) -> PromptEnds:
        """Let the rule choose the token behind each prompt that ends, from its row of `logits` [ended, vocab]."""
        ended = [span for span in spans if span.is_last]
        slot_ids, lengths = torch.tensor(
            [[span.slot for span in ended], [span.end for span in ended]], device=logits.device
        ).unbind(0)
        tokens = self._parts.rule.first_tokens(logits, slot_ids, lengths)
        return PromptEnds(slot_ids, lengths, tokens, live, _longest_end(spans))


def _longest_end(spans: Iterable[PromptSpan]) -> int:
    return max(span.end for span in spans if span.is_last)


def _count_rows(spans: tuple[PromptSpan, ...], num_logits: int, output: TargetOutput) -> list[RowCounts]:
    """Say of each span how many of its rows were computed: in every place it is all rows, or those that are live."""
    num_rows = sum(span.num_rows for span in spans)
    num_features = 0 if output.features is None else output.features.shape[0]

    def share(span: PromptSpan, count: int) -> int:
        return span.num_rows if count == num_rows else int(span.is_last and count > 0)

    return [
        RowCounts(
            prefill_hidden=share(span, num_features),
            prefill_logits=share(span, num_logits),
            prefill_shared=share(span, output.num_shared_rows),
        )
        for span in spans
    ]
