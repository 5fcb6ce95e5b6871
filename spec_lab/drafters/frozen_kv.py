"""Drafts with queries only, over the target's own KV cache: SGLang's FROZEN_KV_MTP (#24436, #25539).

The drafter writes no keys or values. So every step of a round has the same position and the same keys. A step hands two
things to the next: its draft token, and a recurrent vector made of its output. The drafter does not run over prompts.
It has no KV cache and no slots of its own, so there is nothing to roll back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.prompts import PromptPack
from spec_lab.core.protocols import DrafterRequirements
from spec_lab.core.rows import rows_at
from spec_lab.core.types import (
    AttentionMetadata,
    DraftStep,
    FeatureSpec,
    NormSide,
    Request,
    VerifiedRound,
)
from spec_lab.drafters.picking import DraftedRows, DraftPicker
from spec_lab.models.gemma4_assistant import Gemma4Assistant


@dataclass(frozen=True, slots=True)
class Anchor:
    """Sets the position of a round's queries, where L is the committed length. They see keys 0..L-1, or in a
    sliding layer the last of these.

    Attributes:
        positions_past_last_key: 0 for L - 1, the position of the newest key; 1 for L, the position of the bonus token.
        extra_window_keys: keys that a sliding layer sees beyond its window.
    """

    positions_past_last_key: int
    extra_window_keys: int


# transformers takes the bonus token's position, and its mask admits a distance of `sliding_window`, one key more than
# vLLM's. SGLang and vLLM take the position of the hidden state's token.
ANCHORS: Mapping[str, Anchor] = {"last": Anchor(0, 0), "bonus": Anchor(1, 1)}


@dataclass(slots=True)
class FirstStepOutput:
    """The result of a round's first draft step. The later steps start from it.

    Attributes:
        hidden: [batch, hidden_size] the model's output.
        attention: metadata of one query a request over the committed keys.
    """

    hidden: torch.Tensor
    attention: AttentionMetadata
    rows: DraftedRows


class FrozenFirstStep:
    """Runs the first step of every frozen-KV drafter, on the newest emitted token and the target's hidden state.

    SGLang calls it the seed step; nothing about it is random.

    `caches` has an entry for each layer of the head: the KV cache of the target's layer that it reads.
    """

    def __init__(
        self,
        num_draft_tokens: int,
        head: Gemma4Assistant,
        caches: Sequence[LayerCache],
        backend: AttentionBackend,
        anchor: Anchor,
    ) -> None:
        self.num_draft_tokens = num_draft_tokens
        features = FeatureSpec(final_hidden=NormSide.POST_NORM, last_prompt_row=True)
        self.requirements = DrafterRequirements(features=features)
        self.head = head
        self.caches = tuple(caches)
        self.backend = backend
        self._anchor = anchor

    def admit(self, slot: int, request: Request) -> None:
        """Do nothing: there is no state between rounds."""

    def take_prompts(self, pack: PromptPack) -> FirstStepOutput | None:
        """Run the first step of the prompts that end in this pack, from their last row. Return None if none ends."""
        ends = pack.ends
        if ends is None:
            return None
        assert pack.features is not None
        target_hidden = ends.live.of(pack.features)  # `features` may hold every row, or the last rows only
        rows, pages = DraftedRows.of_prompts(ends), ends.live.attention.page_table
        return self._take_first_step(ends.tokens, target_hidden, rows, pages, ends.max_kv_len)

    def take_round(self, verified: VerifiedRound) -> FirstStepOutput:
        """Run the first step from the newest emitted token t[L + n] and the target's hidden state of row n - 1."""
        assert verified.features is not None
        batch, emitted = verified.batch, verified.verification
        num_rows = emitted.tokens.shape[1]
        last = emitted.num_live - 1
        tokens = emitted.tokens.gather(1, last.unsqueeze(1)).squeeze(1)
        first_rows = torch.arange(batch.num_rows, device=last.device) * num_rows
        target_hidden = rows_at(verified.features, first_rows + last)
        rows = DraftedRows(batch.slot_ids, batch.kv_lens + last + 1)
        return self._take_first_step(tokens, target_hidden, rows, batch.page_table, batch.max_kv_len + num_rows)

    def _take_first_step(
        self,
        tokens: torch.Tensor,
        target_hidden: torch.Tensor,
        rows: DraftedRows,
        page_table: torch.Tensor,
        max_kv_len: int,
    ) -> FirstStepOutput:
        """Build the round's attention metadata over `rows.kv_lens` committed keys, and run one step.

        `seq_lens` does not count the query, since its key is never written. With one more, a step would read a slot
        that is unwritten or a rejected token's.
        """
        attention = self.backend.build(
            positions=(rows.kv_lens - 1 + self._anchor.positions_past_last_key).unsqueeze(1),
            seq_lens=rows.kv_lens,
            page_table=page_table,
            max_seq_len=max_kv_len,
        )
        return FirstStepOutput(self.head.forward(tokens, target_hidden, self.caches, attention), attention, rows)


@dataclass(slots=True)
class FrozenState:
    """The state between the steps of a round.

    Attributes:
        tokens: [batch] the newest draft.
        hidden: [batch, hidden_size] the model's newest output.
        frozen_attention: metadata of one query a request, which every step uses.
        attention: None, so that the draft loop advances no metadata.
    """

    tokens: torch.Tensor
    hidden: torch.Tensor
    frozen_attention: AttentionMetadata
    rows: DraftedRows
    attention: None = None


class FrozenKVDrafter(FrozenFirstStep):
    """Drafts a chain of tokens over the target's KV cache."""

    def __init__(
        self,
        num_draft_tokens: int,
        head: Gemma4Assistant,
        caches: Sequence[LayerCache],
        backend: AttentionBackend,
        picker: DraftPicker,
        anchor: Anchor,
    ) -> None:
        super().__init__(num_draft_tokens, head, caches, backend, anchor)
        self.picker = picker

    def ingest(self, pack: PromptPack) -> FrozenState | None:
        first = self.take_prompts(pack)
        return None if first is None else self._start(first)

    def catch_up(self, verified: VerifiedRound) -> FrozenState:
        return self._start(self.take_round(verified))

    def step(self, state: FrozenState, step: DraftStep) -> None:
        recurrent = self.head.project(state.hidden)
        state.hidden = self.head.forward(state.tokens, recurrent, self.caches, state.frozen_attention)
        state.tokens = self.picker.pick(self.head, state.hidden, state.rows, step.column)

    def kept_logits(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return self.picker.kept_logits(slot_ids)

    def _start(self, first: FirstStepOutput) -> FrozenState:
        tokens = self.picker.first(self.head, first.hidden, first.rows)
        return FrozenState(tokens, first.hidden, first.attention, first.rows)
