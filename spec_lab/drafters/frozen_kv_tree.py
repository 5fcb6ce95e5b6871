"""Drafts a tree with queries only (SGLang's FROZEN_KV_MTP with a top-k above 1).

Branches are always exact. Nothing is written while drafting, so no branch can see another's keys. Every branch of every
level is one more query over the same committed keys at the same position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spec_lab.core.draft_tree import DraftTree
from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.prompts import PromptPack
from spec_lab.core.types import AttentionMetadata, DraftStep, VerifiedRound
from spec_lab.drafters.frozen_kv import Anchor, FirstStepOutput, FrozenFirstStep
from spec_lab.drafters.growth import TreeShape
from spec_lab.drafters.picking import DraftedRows
from spec_lab.drafters.siblings import SiblingPicker
from spec_lab.models.gemma4_assistant import Gemma4Assistant


@dataclass(slots=True)
class FrozenTreeState:
    """The state between the levels of a round.

    Attributes:
        hidden: [batch, branches, hidden_size] the model's output for the newest branches.
        frozen_attention: metadata by number of branches, each made when first needed; the entry for 1 has one query for
            each request.
    """

    rows: DraftedRows
    growth: Any
    hidden: torch.Tensor
    frozen_attention: dict[int, AttentionMetadata]


class FrozenKVTreeDrafter(FrozenFirstStep):
    """Drafts a tree over the target's KV."""

    def __init__(
        self,
        shape: TreeShape[Any],
        siblings: SiblingPicker,
        head: Gemma4Assistant,
        caches: Sequence[LayerCache],
        backend: AttentionBackend,
        anchor: Anchor,
    ) -> None:
        super().__init__(shape.depth, head, caches, backend, anchor)
        self.shape = shape
        self.siblings = siblings

    def ingest(self, pack: PromptPack) -> FrozenTreeState | None:
        first = self.take_prompts(pack)
        return None if first is None else self._start(first)

    def catch_up(self, verified: VerifiedRound) -> FrozenTreeState:
        return self._start(self.take_round(verified))

    def step(self, state: FrozenTreeState, step: DraftStep) -> None:
        branches = self.shape.branch(state.growth, state.hidden)
        batch, width = branches.tokens.shape
        hidden = self.head.forward(
            branches.tokens.reshape(-1),
            self.head.project(branches.hidden),
            self.caches,
            self._attention(state, width),
        )
        state.hidden = hidden.view(batch, width, -1)
        self.shape.add(state.growth, self.siblings.pick(self.head, state.hidden, state.rows, step.index))

    def finish(self, state: FrozenTreeState) -> DraftTree:
        return self.shape.finish(state.growth)

    def kept_logits(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return self.siblings.kept_logits(slot_ids)

    def _start(self, first: FirstStepOutput) -> FrozenTreeState:
        hidden = first.hidden.unsqueeze(1)
        growth = self.shape.start(self.siblings.pick(self.head, hidden, first.rows, depth=0), first.rows)
        return FrozenTreeState(first.rows, growth, hidden, {1: first.attention})

    def _attention(self, state: FrozenTreeState, width: int) -> AttentionMetadata:
        """Return metadata of `width` queries for each request, each treated as a separate sequence over the same
        pages."""
        if width not in state.frozen_attention:
            alone = state.frozen_attention[1]
            state.frozen_attention[width] = self.backend.build(
                positions=alone.positions.repeat_interleave(width).unsqueeze(1),
                seq_lens=alone.seq_lens.repeat_interleave(width),
                # For one request this is a view, so nothing is copied.
                page_table=alone.page_table.unsqueeze(1).expand(-1, width, -1).flatten(0, 1),
                max_seq_len=alone.max_seq_len,
            )
        return state.frozen_attention[width]
