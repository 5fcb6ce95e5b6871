"""A decode round may have a tree of drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from spec_kernels.tree_reference import move_path_reference
from spec_lab.core.draft_tree import DraftTree
from spec_lab.core.prompts import PromptEnds
from spec_lab.core.rows import rows_at
from spec_lab.core.tree_protocols import JudgedRows, TreeAttentionBackend, TreeDrafter, TreeRule
from spec_lab.core.types import AttentionMetadata, DraftStep, RoundBatch, VerifiedRound
from spec_lab.engine.experts_read import ReadingStage
from spec_lab.engine.round import DecodeRound, Parts, VerifyOutput

MovePath = Callable[
    [
        list[torch.Tensor],
        torch.Tensor | None,
        torch.Tensor | None,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        int,
    ],
    None,
]
"""Is `spec_kernels.tree_reference.move_path_reference`, or a kernel that does the same."""


@dataclass(slots=True)
class TreeParts:
    """Holds the parts of a round that a tree asks more of, each also in its `Parts`, and what moves a path."""

    drafter: TreeDrafter
    rule: TreeRule
    backend: TreeAttentionBackend
    move_path: MovePath


def tree_round(num_rows: int, page_size: int, parts: Any, move_path: MovePath = move_path_reference) -> TreeRound:
    """Make the round of parts of which drafter, rule and backend know trees."""
    return TreeRound(parts, TreeParts(parts.drafter, parts.rule, parts.backend, move_path), num_rows, page_size)


class TreeRound(DecodeRound):
    """Has the stages of a round, of which verify, accept and the drafts are those of a tree.

    Behind accept stands a chain: the KV and the features of the accepted path lie where those of accepted drafts of a
    chain would, so that catch-up, its pruning and all that follows are as they are.
    """

    def __init__(self, parts: Parts, tree: TreeParts, num_rows: int, page_size: int) -> None:
        """`num_rows`: N of the tree, the root with the drafts."""
        super().__init__(parts)
        self._tree = tree
        self._depth = tree.drafter.num_draft_tokens
        self._page_size = page_size
        self.tree_rows = num_rows
        num_slots = parts.slots.kv_lens.shape[0]
        # The parent of each row of a slot's next tree, [num_slots + 1, N]; the last slot is the scratch slot.
        self.parents = torch.zeros((num_slots, num_rows), dtype=torch.int64, device=parts.slots.kv_lens.device)

    def waiting_drafts(self, slots: list[int]) -> list[list[int]]:
        """Tell the spines: from the root on the first child of each, -1 behind the last."""
        trees = zip(self.parents[slots].tolist(), self.parts.slots.input_ids[slots].tolist(), strict=True)
        return [_spine(parents, tokens, self._depth) for parents, tokens in trees]

    def attention(self, batch: RoundBatch) -> AttentionMetadata:
        """Build the metadata of verify's rows: slots L..L+N-1, positions L + depth."""
        parents = self._parents(batch)
        max_seq_len = batch.max_kv_len + parents.shape[1]
        return self._tree.backend.build_tree(parents, self._depth, batch.kv_lens, batch.page_table, max_seq_len)

    def accept(self, output: VerifyOutput) -> VerifiedRound:
        """Let the rule walk the tree, and leave its path as a chain of n rows."""
        batch = output.batch
        with self.parts.timer.span("accept"):
            judged = JudgedRows(
                output.logits,
                batch.input_ids,
                self._parents(batch),
                batch.active,
                batch.slot_ids,
                batch.kv_lens,
                self.parts.drafter.kept_logits(batch.slot_ids),
            )
            walk = self._tree.rule.walk(judged, self._depth)
            features = self._compact(batch, walk.path, output.features)
            return VerifiedRound(batch, walk.verification, features)

    def recur(self, state: Any) -> DraftTree:
        """Run the other draft steps, and return the tree that is to be verified."""
        with self.parts.timer.span("recur"), self.parts.experts_read.stage(ReadingStage.RECUR):
            return self._collect(state)

    def commit(self, verified: VerifiedRound, drafts: DraftTree) -> None:
        batch = verified.batch
        with self.parts.timer.span("commit"):
            self.parents.index_copy_(0, batch.slot_ids, drafts.parents)
            self.parts.slots.commit(batch, verified.verification, drafts.tokens)

    def start(self, ends: PromptEnds, state: Any) -> None:
        """Draft from the state that a prompt pass ended in, and leave the first round's trees in the slots."""
        drafts = self._collect(state)
        self.parents.index_copy_(0, ends.slot_ids, drafts.parents)
        self.parts.slots.start(ends, drafts.tokens)

    def _collect(self, state: Any) -> DraftTree:
        """Take level 1 from `state`, and run a draft step for each further one."""
        drafter = self._tree.drafter
        columns = torch.arange(self._depth, device=self.parents.device)
        for index in range(1, self._depth):
            drafter.step(state, DraftStep(index, columns[index : index + 1]))
        return drafter.finish(state)

    def _parents(self, batch: RoundBatch) -> torch.Tensor:
        return rows_at(self.parents, batch.slot_ids)

    def _compact(self, batch: RoundBatch, path: torch.Tensor, features: torch.Tensor | None) -> torch.Tensor | None:
        """Move the KV of the path's rows to the slots L + 1, L + 2, ... of all layers, and return their features.

        Keys are rotated for their positions already. What is moved behind the path is junk, which the next verify
        writes over.
        """
        moved = None if features is None else features.new_empty(path.numel(), features.shape[1])
        caches = list(self.parts.cache.tensors)
        self._tree.move_path(caches, moved, features, path, batch.kv_lens, batch.page_table, self._page_size)
        return moved


def _spine(parents: list[int], tokens: list[int], depth: int) -> list[int]:
    row: int | None = 0
    drafts: list[int] = []
    while row is not None and len(drafts) <= depth:
        drafts.append(tokens[row])
        row = next((child for child in range(row + 1, len(parents)) if parents[child] == row), None)
    return [*drafts[1:], *[-1] * (depth + 1 - len(drafts))]
