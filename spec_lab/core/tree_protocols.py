"""The protocols of parts that support trees of drafts. Each extends the protocol for chains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from spec_lab.core.draft_tree import DraftTree, TreeRows
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.protocols import AcceptanceRule, Drafter
from spec_lab.core.types import AttentionMetadata, Verification


class TreeAttentionBackend(AttentionBackend, Protocol):
    """An attention backend that supports the rows of a tree."""

    def build_tree(
        self, parents: torch.Tensor, depth: int, prefix_lens: torch.Tensor, page_table: torch.Tensor, max_seq_len: int
    ) -> AttentionMetadata:
        """Make the metadata of all rows of trees of up to `depth` levels, after `prefix_lens` [batch] keys.

        `parents` is [batch, N]. The rows write the slots after the prefix, in their order.
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
        """Make the metadata of the next level of trees. Each row sees the keys that its parent row in `before` sees,
        and its own.

        `came_from` [batch, num_queries] is the index of the parent row; `before` is None for the first level. The rows
        write the slots after all rows of earlier levels.
        """
        ...


@dataclass(slots=True)
class JudgedRows:
    """A verified tree, for a rule to walk.

    Attributes:
        logits: [batch, N, vocab] of the target; row j predicts the token after row j.
        tokens: [batch, N] the root's token and the drafts.
        parents: [batch, N].
        active: [batch] bool; padded rows are False.
        slot_ids: [batch] slot of each request; padded ones have the scratch slot.
        kv_lens: [batch] L at the start of the round, part of the key of its random numbers.
        draft_logits: [batch, branches, vocab]; the children of each branch of a static tree were drawn from
            softmax(draft_logits). None for drafts that were not sampled.
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
        verification: the verification of the path's drafts as a chain, with depth + 1 columns.
        path: [batch, depth + 1] rows of the path; junk, but valid indices, from column n on.
    """

    verification: Verification
    path: torch.Tensor


class TreeRule(AcceptanceRule, Protocol):
    """An acceptance rule that also judges trees."""

    def walk(self, judged: JudgedRows, depth: int) -> Walk:
        """Accept a path from the root with at most `depth` drafts. It uses device tensors only."""
        ...


class TreeDrafter(Drafter[Any], Protocol):
    """Drafts a tree of `num_draft_tokens` levels: `catch_up` makes the first, each `step` another."""

    def finish(self, state: Any) -> DraftTree:
        """Return the tree to verify."""
        ...
