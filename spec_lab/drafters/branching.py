"""Drafts the branches of a tree with a drafter that has a KV cache.

The rows of each level are written after those of the level before. Of the branches' keys, each is to see those of its
own ancestors only. So when branches are chosen, the list of keys that each one sees is gathered with it, as in EAGLE's
own code. SGLang gathers only the hidden state. There, from the second level on, a branch may see keys of another
branch.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch

from spec_lab.core.draft_tree import DraftTree, TreeRows
from spec_lab.core.tree_protocols import TreeAttentionBackend
from spec_lab.core.types import AttentionMetadata, DraftStep
from spec_lab.drafters.catchup import CaughtUp, CaughtUpDrafter
from spec_lab.drafters.growth import Branches, TreeShape
from spec_lab.drafters.picking import DraftedRows
from spec_lab.drafters.siblings import SiblingPicker


@dataclass(slots=True)
class BranchState:
    """The state between the levels of a round.

    Attributes:
        hidden: [batch, branches, hidden_size] the model's output for the newest branches.
        live: metadata of the row from which the root's drafts come. It sees all keys before the branches.
        newest: the keys that the newest branches see; None before there are any, or if branches write no keys.
        frozen: metadata of branches that write no keys, by their number; each is made when first needed.
    """

    rows: DraftedRows
    growth: Any
    hidden: torch.Tensor
    live: AttentionMetadata
    newest: TreeRows | None = None
    frozen: dict[int, AttentionMetadata] = field(default_factory=dict)


class BranchDrafter(CaughtUpDrafter[BranchState]):
    """Drafts a tree level by level. It is mixed into a class that takes the first step.

    Attributes:
        head: the draft head, which the other class declares with a narrower type.
    """

    shape: TreeShape[Any]
    siblings: SiblingPicker
    head: Any
    backend: Any

    @abstractmethod
    def run_branches(self, branches: Branches, attention: AttentionMetadata) -> torch.Tensor:
        """Run the model on branches, and return its output [batch * branches, hidden_size]."""

    def step(self, state: BranchState, step: DraftStep) -> None:
        """Choose the branches of the newest level, run them, and pick tokens below each."""
        branches = self.shape.branch(state.growth, state.hidden)
        batch, width = branches.tokens.shape
        out = self.run_branches(branches, self.attention_of(branches, state))
        state.hidden = out.view(batch, width, -1)
        self.shape.add(state.growth, self.siblings.pick(self.head, state.hidden, state.rows, step.index))

    def attention_of(self, branches: Branches, state: BranchState) -> AttentionMetadata:
        """Build the metadata of new branches."""
        return see_ancestors(self.backend, state, branches)

    def finish(self, state: BranchState) -> DraftTree:
        return self.shape.finish(state.growth)

    def kept_logits(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return self.siblings.kept_logits(slot_ids)

    def begin(self, live: CaughtUp) -> BranchState:
        hidden = live.hidden.unsqueeze(1)
        return BranchState(
            live.rows,
            self.shape.start(self.siblings.pick(self.head, hidden, live.rows, depth=0), live.rows),
            hidden,
            live.attention,
        )


def see_ancestors(backend: TreeAttentionBackend, state: BranchState, branches: Branches) -> AttentionMetadata:
    """Build the metadata of new branches: each sees the keys that its parent branch sees, and its own."""
    came_from, before, live = branches.came_from, state.newest, state.live
    num_rows = came_from.shape[1] + (0 if before is None else before.num_tail)
    attention = backend.build_branches(before, came_from, live.seq_lens, live.page_table, live.max_seq_len + num_rows)
    state.newest = attention.tree
    return attention
