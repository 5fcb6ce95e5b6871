"""Vanilla MTP: a module with its own KV cache for each draft (DeepSeek-V3, arXiv 2412.19437; TensorRT-LLM's
`MTPWorker`).

Module i (from 0) reads the pairs (t[r+1], h[r]) with the target's hidden states. Then it reads a pair from each earlier
module: that module's draft, and its output at the last row. Module i holds pair r at position r - i, as in
TensorRT-LLM. So the last row of every module is at P, the last position with a hidden state of the target, and sees
P + 1 keys. The first i pairs of a text have no row in module i.

TensorRT-LLM runs other rows, and so does `only_window`, to measure what they cost and save. There every module runs
over the K rows of the window, and drops the oldest pair for each draft it is given. After K accepted drafts the window
moves by K + 1, one more than its rows. So no module ever writes the position before the new window. Nor does module i
overwrite all rows that it ran on drafts, if the round emits more than K - i tokens. The keys and values of the other
rows stay those of a draft's pair, not of the target's.

After a round, module i here runs over K + 1 + i rows: the K of the window, the last pair that left it, and i drafts.
However many tokens a round emits, these rows cover every row that the last round made from a draft, and leave out no
position. So a module's cache depends only on the text, and not on how rounds divided it. The last K rows are those of
TensorRT-LLM; of the others only the KV is used.

Nor does the cache depend on how a prompt is cut into chunks: module i takes all pairs of a chunk, i positions further
back. After the prompt the window holds its last K pairs. To draft, module i > 0 runs over these again, and over the
drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from spec_lab.core.kept import PrunePolicy
from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.passes import Pass
from spec_lab.core.prompts import LiveRows, PromptPack
from spec_lab.core.protocols import DrafterRequirements
from spec_lab.core.ragged import build_metadata, even_batches
from spec_lab.core.types import AttentionMetadata, DraftStep, FeatureSpec, Request, VerifiedRound
from spec_lab.drafters.mtp_window import MtpRows, MtpWindow, pair_with_next, slide, with_room
from spec_lab.drafters.picking import DraftedRows, DraftPicker
from spec_lab.drafters.recurrent import DraftModule


@dataclass(slots=True)
class MtpVanillaState:
    """The state between two modules.

    Attributes:
        tokens: [batch] the newest draft.
        rows: the newest pairs that the first module read, with room for the K - 1 pairs that drafts add. It is filled
            in place, so that a step that is captured alone finds it at a fixed address.
        hidden: [batch, hidden_size] the output, at its last row, of the module that ran last.
        last_row: metadata of one query at P, the same for all modules of a round. Nothing is advanced between steps, so
            `attention` is None.
        drafted: the requests that draft.
        of_prompts: the round follows prompts, so `prune.prefill` chooses the rows that a module keeps.
    """

    tokens: torch.Tensor
    rows: MtpRows
    hidden: torch.Tensor
    last_row: AttentionMetadata
    drafted: DraftedRows
    of_prompts: bool
    attention: AttentionMetadata | None = None


@dataclass(kw_only=True, eq=False)
class MtpVanillaDrafter:
    """Drafts one token with each of `modules`; `caches` holds the KV of each, in the target's slots.

    Attributes:
        only_window: every module runs over K rows, so that its cache has holes and rows of drafts.
    """

    modules: Sequence[DraftModule]
    caches: Sequence[LayerCache]
    window: MtpWindow
    features: FeatureSpec
    backend: AttentionBackend
    prune: PrunePolicy
    picker: DraftPicker
    only_window: bool = False

    def __post_init__(self) -> None:
        assert len(self.modules) == len(self.caches) == self.window.size
        self.num_draft_tokens = len(self.modules)
        self._num_rows = self.num_draft_tokens + (0 if self.only_window else 1)
        passes = tuple(self._num_rows + (0 if self.only_window else index) for index in range(len(self.modules)))
        self.requirements = DrafterRequirements(self.features, catchup_rows=passes, distinct_steps=True)

    def admit(self, slot: int, request: Request) -> None:
        self.window.clear(slot)

    def ingest(self, pack: PromptPack) -> MtpVanillaState | None:
        """Write a chunk's pairs to the cache of every module. After a prompt's last chunk, also draft."""
        assert pack.features is not None
        ends, kept_of = pack.ends, self.prune.prompt.in_drafter
        self._slide(pack, pack.features)
        live = None if ends is None else ends.live
        hidden = self.modules[0].forward(
            pack.next_token_ids, pack.features, Pass(self.caches[0], pack.attention, kept_of(live))
        )
        for index in range(1, self.num_draft_tokens):
            spans = [replace(span, start=span.start - index, end=span.end - index) for span in pack.spans]
            attention = build_metadata(self.backend, spans, pack.attention.page_table)
            self.modules[index].forward(
                pack.next_token_ids, pack.features, Pass(self.caches[index], attention, kept_of(None))
            )
        if ends is None:
            return None
        drafted = DraftedRows.of_prompts(ends)
        pairs = pair_with_next(self.window.of(ends.slot_ids), ends.tokens)
        return self._start(pairs, hidden, ends.live.attention, drafted, True)

    def catch_up(self, verified: VerifiedRound) -> MtpVanillaState:
        """Run the first module over the N rows (or K) up to the last valid one, and slide the window by n.

        An inactive request is treated as if n were 1 (`Verification.num_live`), but its window does not move.
        """
        assert verified.features is not None
        batch, emitted = verified.batch, verified.verification
        inputs = MtpRows(batch.input_ids, verified.features.view(*batch.input_ids.shape, -1))
        num_live = emitted.num_live
        newest = emitted.tokens.gather(1, num_live.unsqueeze(1) - 1).squeeze(1)
        rows = pair_with_next(slide(self.window.of(batch.slot_ids), inputs, num_live, self._num_rows), newest)
        self.window.slide(batch.slot_ids, inputs, emitted.num_emitted)
        ends = batch.kv_lens + num_live
        last_row = self.backend.build(
            positions=(ends - 1).unsqueeze(1),
            seq_lens=ends,
            page_table=batch.page_table,
            max_seq_len=batch.max_kv_len + self.num_draft_tokens + 1,
        )
        hidden = self._output(0, rows, last_row, False)
        return self._start(rows, hidden, last_row, DraftedRows(batch.slot_ids, ends), False)

    def step(self, state: MtpVanillaState, step: DraftStep) -> None:
        num_rows = state.rows.num_rows - self.num_draft_tokens + 1 + step.index
        state.rows.put(num_rows - 1, state.tokens, state.hidden)
        rows = state.rows.first(num_rows)
        if self.only_window:
            rows = rows.last(self.num_draft_tokens)
        state.hidden = self._output(step.index, rows, state.last_row, state.of_prompts)
        state.tokens = self.picker.pick(self.modules[step.index], state.hidden, state.drafted, step.column)

    def kept_logits(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return self.picker.kept_logits(slot_ids)

    def _slide(self, pack: PromptPack, features: torch.Tensor) -> None:
        """Slide the windows over the chunks."""
        for batch in even_batches(pack.attention):
            slot_ids = pack.slot_ids[batch.requests]
            tokens, hidden = (part[batch.rows].unflatten(0, (len(slot_ids), -1)) for part in (pack.token_ids, features))
            self.window.slide(slot_ids, MtpRows(tokens, hidden), torch.full_like(slot_ids, tokens.shape[1]))

    def _start(
        self,
        rows: MtpRows,
        hidden: torch.Tensor,
        last_row: AttentionMetadata,
        drafted: DraftedRows,
        of_prompts: bool,
    ) -> MtpVanillaState:
        """Pick draft 1 from the first module's output `hidden` [batch, hidden_size] at the last of `rows`."""
        tokens = self.picker.pick(self.modules[0], hidden, drafted)
        room = with_room(rows, self.num_draft_tokens - 1)
        return MtpVanillaState(tokens, room, hidden, last_row, drafted=drafted, of_prompts=of_prompts)

    def _output(self, index: int, rows: MtpRows, last_row: AttentionMetadata, of_prompts: bool) -> torch.Tensor:
        """Run module `index` over `rows`, and return its output [batch, hidden_size] at the last row, `last_row`.

        Rows at negative positions write to scratch. They occur if a prompt is shorter than K, or before a module's
        first pair.
        """
        lengths, num_rows = last_row.seq_lens, rows.num_rows
        positions = lengths.unsqueeze(1) + torch.arange(-num_rows, 0, device=lengths.device)
        attention = self.backend.build(positions, lengths, last_row.page_table, last_row.max_seq_len)
        row_ends = torch.arange(1, lengths.shape[0] + 1, device=lengths.device) * num_rows
        if of_prompts:
            kept = self.prune.prompt.in_drafter(LiveRows(row_ends - 1, last_row))
        else:
            kept = self.prune.of_catchup(row_ends - 1, last_row)
        at = Pass(self.caches[index], attention, kept)
        return self.modules[index].forward(rows.tokens.flatten(), rows.hidden.flatten(0, 1), at)
