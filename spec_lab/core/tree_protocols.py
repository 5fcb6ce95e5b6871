"""The promises of the parts that a tree of drafts needs; each also keeps that of its kind for chains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from spec_lab.core.draft_tree import DraftTree, TreeRows
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.protocols import AcceptanceRule, Drafter
from spec_lab.core.types import AttentionMetadata, Verification


class TreeAttentionBackend(AttentionBackend, Protocol):
    """A backend that attends from the rows of a tree."""

    def build_tree(
        self, parents: torch.Tensor, depth: int, prefix_lens: torch.Tensor, page_table: torch.Tensor, max_seq_len: int
    ) -> AttentionMetadata:
        """Make the metadata for all rows of trees at most `depth` deep behind `prefix_lens` [batch] keys.

        `parents` are [batch, N]. The rows write the slots behind the prefix, in their order.
        """
        ...

    def build_branches(
        self,
        before: TreeRows | None,
        came_from: torch.Tensor,
        prefix_lens: torch.Tensor,
        page_table: torch.Tensor,
        max_seq_len: int,
    ) -> AttentionMetadata:
        """Make the metadata for the next level of trees, whose rows see what a row of the level `before` sees, and
        themselves.

        `came_from` [batch, num_queries] says which row that is; `before` is None for the first level. The rows write
        the slots behind all rows of earlier levels.
        """
        ...


@dataclass(slots=True)
class JudgedRows:
    """A verified tree, for a rule to walk.

    Attributes:
        logits: [batch, N, vocab] of the target; row j predicts the token after row j.
        tokens: [batch, N] the root's and the drafts'.
        parents: [batch, N].
        active: [batch] bool; padded rows are False.
        slot_ids: [batch] slot of each request; padded ones have the scratch slot.
        kv_lens: [batch] L at the start of the round, the key of its noise.
        draft_logits: [batch, branches, vocab] with softmax(draft_logits) what the children of each branch of a static
            tree were drawn from; None for drafts that are given.
    """

    logits: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    active: torch.Tensor
    slot_ids: torch.Tensor
    kv_lens: torch.Tensor
    draft_logits: torch.Tensor | None = None


@dataclass(slots=True)
class Walk:
    """A path from the root that a rule accepted.

    Attributes:
        verification: as of a chain of the path's drafts, with depth + 1 columns.
        path: [batch, depth + 1] rows of the path, junk but in range from column n on.
    """

    verification: Verification
    path: torch.Tensor


class TreeRule(AcceptanceRule, Protocol):
    """A rule that judges trees too."""

    def walk(self, judged: JudgedRows, depth: int) -> Walk:
        """Follow accepted drafts from the root, at most `depth` of them. Touches device tensors only."""
        ...


class TreeDrafter(Drafter[Any], Protocol):
    """Drafts a tree of `num_draft_tokens` levels: `catch_up` makes the first, each `step` another."""

    def finish(self, state: Any) -> DraftTree:
        """Return the tree that is to be verified."""
        ...
