"""Drafts with queries only, over the target's own KV cache: SGLang's FROZEN_KV_MTP (#24436, #25539).

The drafter writes no keys or values. So every step of a round has the same position and the same keys. A step hands two
things to the next: its draft token, and a recurrent vector made of its output. The drafter does not run over prompts.
It has no KV cache and no slots of its own, so there is nothing to roll back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    VerifiedRound,
)
from spec_lab.drafters.branching import BranchDrafter, BranchState
from spec_lab.drafters.catchup import CaughtUp, CaughtUpDrafter
from spec_lab.drafters.growth import Branches, TreeShape
from spec_lab.drafters.picking import DraftedRows, DraftPicker
from spec_lab.drafters.siblings import SiblingPicker
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


@dataclass(kw_only=True, eq=False)
class FrozenFirstStep:
    """Runs the first step of every frozen-KV drafter, on the newest emitted token and the target's hidden state.

    SGLang calls it the seed step; nothing about it is random.

    Attributes:
        caches: for each layer of the head, the KV cache of the target's layer that it reads.
    """

    num_draft_tokens: int
    head: Gemma4Assistant
    caches: Sequence[LayerCache]
    backend: AttentionBackend
    anchor: Anchor

    def __post_init__(self) -> None:
        features = FeatureSpec(final_hidden=NormSide.POST_NORM, last_prompt_row=True)
        self.requirements = DrafterRequirements(features=features)

    def take_prompts(self, pack: PromptPack) -> CaughtUp | None:
        """Run the first step of the prompts that end in this pack, from their last row. Return None if none ends."""
        ends = pack.ends
        if ends is None:
            return None
        assert pack.features is not None
        target_hidden = ends.live.of(pack.features)  # `features` may hold every row, or the last rows only
        rows, pages = DraftedRows.of_prompts(ends), ends.live.attention.page_table
        return self._take_first_step(ends.tokens, target_hidden, rows, pages, ends.max_kv_len)

    def take_round(self, verified: VerifiedRound) -> CaughtUp:
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
    ) -> CaughtUp:
        """Build the round's attention metadata over `rows.kv_lens` committed keys, and run one step.

        `seq_lens` does not count the query, since its key is never written. With one more, a step would read a slot
        that is unwritten or a rejected token's.
        """
        attention = self.backend.build(
            positions=(rows.kv_lens - 1 + self.anchor.positions_past_last_key).unsqueeze(1),
            seq_lens=rows.kv_lens,
            page_table=page_table,
            max_seq_len=max_kv_len,
        )
        return CaughtUp(self.head.forward(tokens, target_hidden, self.caches, attention), attention, rows)


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


@dataclass(kw_only=True, eq=False)
class FrozenKVDrafter(FrozenFirstStep, CaughtUpDrafter[FrozenState]):
    """Drafts a chain of tokens over the target's KV cache."""

    picker: DraftPicker

    def step(self, state: FrozenState, step: DraftStep) -> None:
        recurrent = self.head.project(state.hidden)
        state.hidden = self.head.forward(state.tokens, recurrent, self.caches, state.frozen_attention)
        state.tokens = self.picker.pick(self.head, state.hidden, state.rows, step.column)

    def kept_logits(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return self.picker.kept_logits(slot_ids)

    def begin(self, live: CaughtUp) -> FrozenState:
        tokens = self.picker.pick(self.head, live.hidden, live.rows)
        return FrozenState(tokens, live.hidden, live.attention, live.rows)


@dataclass(kw_only=True, eq=False)
class FrozenKVTreeDrafter(FrozenFirstStep, BranchDrafter):
    """Drafts a tree (SGLang's FROZEN_KV_MTP with a top-k above 1).

    Branches are always exact. Nothing is written while drafting, so no branch can see another's keys. Every branch of
    every level is one more query over the same committed keys at the same position.
    """

    shape: TreeShape[Any]
    siblings: SiblingPicker

    def attention_of(self, branches: Branches, state: BranchState) -> AttentionMetadata:
        """Treat each branch as a sequence of its own over the pages of its request."""
        width, alone = branches.tokens.shape[1], state.live
        if width == 1:
            return alone
        if width not in state.frozen:
            state.frozen[width] = self.backend.build(
                positions=alone.positions.repeat_interleave(width).unsqueeze(1),
                seq_lens=alone.seq_lens.repeat_interleave(width),
                # For one request this is a view, so nothing is copied.
                page_table=alone.page_table.unsqueeze(1).expand(-1, width, -1).flatten(0, 1),
                max_seq_len=alone.max_seq_len,
            )
        return state.frozen[width]

    def run_branches(self, branches: Branches, attention: AttentionMetadata) -> torch.Tensor:
        recurrent = self.head.project(branches.hidden)
        return self.head.forward(branches.tokens.reshape(-1), recurrent, self.caches, attention)
