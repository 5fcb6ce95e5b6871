"""The shape of a round's drafts: a chain, or a tree."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F

from spec_kernels.tree_reference import move_path_reference
from spec_lab.core.draft_tree import DraftTree
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op
from spec_lab.core.layer_protocols import MetadataMover
from spec_lab.core.prompts import PromptEnds
from spec_lab.core.protocols import Drafter, State
from spec_lab.core.rows import rows_at
from spec_lab.core.tree_protocols import JudgedRows, TreeAttentionBackend, TreeDrafter, TreeRule
from spec_lab.core.types import (
    AcceptanceInputs,
    AttentionMetadata,
    DraftStep,
    RoundBatch,
    VerifiedRound,
)
from spec_lab.engine.parts import Parts, VerifyOutput
from spec_lab.engine.slots import SlotState

StepScope = Callable[[], AbstractContextManager[None]]
"""Opens a context around draft steps. Inside, `ExpertsRead` counts experts for a stage, or nothing."""


def collect_drafts(
    drafter: Drafter[State], mover: MetadataMover, state: State, num_draft_tokens: int | None = None
) -> torch.Tensor:
    """Take draft 1 from `state`, and run a recurrent step for each further draft; return the drafts [batch, made].

    `num_draft_tokens`: how many; None for the drafter's own number.
    """
    if num_draft_tokens is None:
        num_draft_tokens = drafter.num_draft_tokens
    drafts = state.tokens.new_zeros((state.tokens.shape[0], num_draft_tokens))
    columns = torch.arange(num_draft_tokens, device=drafts.device)
    if num_draft_tokens:
        drafts[:, 0] = state.tokens
    for index in range(1, num_draft_tokens):
        if state.attention is not None:
            mover.advance(state.attention)
        drafter.step(state, DraftStep(index, columns[index : index + 1]))
        drafts[:, index] = state.tokens
    return drafts


class Drafts(Protocol):
    """The steps of a round that differ between a tree and a chain.

    Attributes:
        tree_rows: verify rows for each request if the drafts form a tree; None for a chain.
    """

    tree_rows: int | None

    def mark(self, batch: RoundBatch) -> RoundBatch:
        """Add the parent of each row to a batch of trees. A batch of chains needs no addition."""
        ...

    def attention(self, batch: RoundBatch) -> AttentionMetadata:
        """Build the metadata of the verify rows."""
        ...

    def judge(self, output: VerifyOutput, kept_logits: torch.Tensor | None) -> VerifiedRound:
        """Let the rule judge the drafts, and arrange the accepted ones as a chain."""
        ...

    def collect(self, most: int, mover: MetadataMover, state: Any, scope: StepScope) -> Any:
        """Run the draft steps after the first, and return `most` drafts; for a tree, of as many levels."""
        ...

    def leave(self, slots: SlotState, verified: VerifiedRound, drafts: Any) -> None:
        """Write the next round's inputs to the slots."""
        ...

    def start(self, slots: SlotState, ends: PromptEnds, drafts: Any) -> None:
        """Write the first round's inputs to the slots, after a prompt pass."""
        ...

    def waiting(self, slots: SlotState, slot_ids: list[int]) -> list[list[int]]:
        """Read the drafts in each of `slot_ids` back to the host; of a tree, those of its spine."""
        ...


class Chain:
    """Drafts that form a chain of K tokens. The slots may have room for more."""

    tree_rows: int | None = None

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def mark(self, batch: RoundBatch) -> RoundBatch:
        return batch

    def attention(self, batch: RoundBatch) -> AttentionMetadata:
        """Build the metadata of rows at positions L..L+K."""
        num_rows = batch.input_ids.shape[1]
        attention = self._parts.backend.build(
            positions=batch.kv_lens.unsqueeze(1) + torch.arange(num_rows, device=batch.kv_lens.device),
            seq_lens=batch.kv_lens + num_rows,
            page_table=batch.page_table,
            max_seq_len=batch.max_kv_len + num_rows,
        )
        attention.recurrent = batch.recurrent
        return attention

    def judge(self, output: VerifyOutput, kept_logits: torch.Tensor | None) -> VerifiedRound:
        batch, num_verified = output.batch, output.batch.draft_tokens.shape[1]
        if kept_logits is not None and kept_logits.shape[1] > num_verified:
            kept_logits = kept_logits[:, :num_verified]
        inputs = AcceptanceInputs(
            logits=output.logits,
            draft_tokens=batch.draft_tokens,
            active=batch.active,
            slot_ids=batch.slot_ids,
            kv_lens=batch.kv_lens,
            draft_logits=kept_logits,
            num_drafts=batch.num_drafts,
        )
        return VerifiedRound(batch, self._parts.rule.accept(inputs), output.features)

    def collect(self, most: int, mover: MetadataMover, state: Any, scope: StepScope) -> torch.Tensor:
        drafter: Any = self._parts.drafter
        with scope():
            if most and drafter.requirements.drafts_rest and mover is self._parts.backend:
                rest: torch.Tensor = drafter.draft_rest(state, most)
                return rest
            return collect_drafts(drafter, mover, state, most)

    def leave(self, slots: SlotState, verified: VerifiedRound, drafts: torch.Tensor) -> None:
        slots.commit(verified.batch, verified.verification, _widened(drafts, slots))

    def start(self, slots: SlotState, ends: PromptEnds, drafts: torch.Tensor) -> None:
        slots.start(ends, _widened(drafts, slots))

    def waiting(self, slots: SlotState, slot_ids: list[int]) -> list[list[int]]:
        drafts: list[list[int]] = slots.input_ids[slot_ids, 1:].tolist()
        return drafts


def _widened(drafts: torch.Tensor, slots: SlotState) -> torch.Tensor:
    """Pad drafts [batch, K] to the width of the slots."""
    missing = slots.input_ids.shape[1] - 1 - drafts.shape[1]
    return F.pad(drafts, (0, missing)) if missing else drafts


class Tree:
    """Drafts that form a tree: N rows, each of which names its parent.

    After acceptance, the KV and features of the accepted path are moved to where a chain has those of its accepted
    drafts. So catch-up and everything after it treat the path as a chain.
    """

    def __init__(
        self, parts: Parts, num_rows: int, page_size: int, kernels: KernelSet = TORCH_FORMS, keeps_path: bool = False
    ) -> None:
        """Keep the parts, which support trees.

        Args:
            num_rows: N, the root and all drafts.
            keeps_path: the host reads which rows were accepted.
        """
        self._cache = parts.cache
        self._drafter = cast(TreeDrafter, parts.drafter)
        self._rule = cast(TreeRule, parts.rule)
        self._backend = cast(TreeAttentionBackend, parts.backend)
        self._move_path = kernels.get(Op.MOVE_PATH, move_path_reference)
        self._depth = parts.drafter.num_draft_tokens
        self._page_size = page_size
        self._keeps_path = keeps_path
        self.tree_rows: int | None = num_rows
        num_slots = parts.slots.kv_lens.shape[0]
        # The parent of each row of a slot's next tree, [num_slots + 1, N]; the last slot is the scratch slot.
        self.parents = torch.zeros((num_slots, num_rows), dtype=torch.int64, device=parts.slots.kv_lens.device)

    def of_first(self, num_rows: int) -> Tree:
        """Return the same trees with only the first `num_rows` rows verified, which must be a tree of their own."""
        part = copy(self)
        part.tree_rows, part._depth = num_rows, min(self._depth, num_rows - 1)
        return part

    def mark(self, batch: RoundBatch) -> RoundBatch:
        parents = rows_at(self.parents, batch.slot_ids)[:, : self.tree_rows]
        return replace(batch, input_ids=batch.input_ids[:, : self.tree_rows], parents=parents)

    def attention(self, batch: RoundBatch) -> AttentionMetadata:
        """Build the metadata of the tree's rows. Their KV goes to the cache slots of positions L..L+N-1, one after
        another. A row's own position, for its rotation, is L plus its depth in the tree."""
        parents = _parents(batch)
        max_seq_len = batch.max_kv_len + parents.shape[1]
        return self._backend.build_tree(parents, self._depth, batch.kv_lens, batch.page_table, max_seq_len)

    def judge(self, output: VerifyOutput, kept_logits: torch.Tensor | None) -> VerifiedRound:
        """Let the rule walk the tree, and arrange the accepted path as a chain of n rows."""
        batch = output.batch
        judged = JudgedRows(
            logits=output.logits,
            tokens=batch.input_ids,
            parents=_parents(batch),
            active=batch.active,
            slot_ids=batch.slot_ids,
            kv_lens=batch.kv_lens,
            draft_logits=kept_logits,
        )
        walk = self._rule.walk(judged, self._depth)
        walk.verification.path = walk.path if self._keeps_path else None
        return VerifiedRound(batch, walk.verification, self._compact(batch, walk.path, output.features))

    def collect(self, most: int, mover: MetadataMover, state: Any, scope: StepScope) -> DraftTree:
        """Run a step for each level after the first. The drafter builds the metadata of each level."""
        columns = torch.arange(most, device=self.parents.device)
        with scope():
            for index in range(1, most):
                self._drafter.step(state, DraftStep(index, columns[index : index + 1]))
        return self._drafter.finish(state)

    def leave(self, slots: SlotState, verified: VerifiedRound, drafts: DraftTree) -> None:
        self.parents.index_copy_(0, verified.batch.slot_ids, drafts.parents)
        slots.commit(verified.batch, verified.verification, drafts.tokens)

    def start(self, slots: SlotState, ends: PromptEnds, drafts: DraftTree) -> None:
        self.parents.index_copy_(0, ends.slot_ids, drafts.parents)
        slots.start(ends, drafts.tokens)

    def waiting(self, slots: SlotState, slot_ids: list[int]) -> list[list[int]]:
        """Return the spine of each tree: the first child of each row, starting at the root, padded with -1."""
        trees = zip(self.parents[slot_ids].tolist(), slots.input_ids[slot_ids].tolist(), strict=True)
        return [spine(parents, tokens, self._depth) for parents, tokens in trees]

    def _compact(self, batch: RoundBatch, path: torch.Tensor, features: torch.Tensor | None) -> torch.Tensor | None:
        """Move the KV of the path's rows to the cache slots of positions L + 1, L + 2, ... in all layers, and return
        the rows' features.

        The keys are already rotated for their positions. Columns of `path` after its last row are junk. So is the KV
        that they move, which the next verify overwrites.
        """
        moved = None if features is None else features.new_empty(path.numel(), features.shape[1])
        caches = list(self._cache.tensors)
        self._move_path(caches, moved, features, path, batch.kv_lens, batch.page_table, self._page_size)
        return moved


class TreeBehindRoot(Chain):
    """Verifies the pending token alone, and drafts a tree or nothing."""

    def __init__(self, parts: Parts, tree: Tree) -> None:
        super().__init__(parts)
        self._tree = tree

    def collect(self, most: int, mover: MetadataMover, state: Any, scope: StepScope) -> Any:
        return self._tree.collect(most, mover, state, scope) if most else super().collect(most, mover, state, scope)

    def leave(self, slots: SlotState, verified: VerifiedRound, drafts: Any) -> None:
        if isinstance(drafts, DraftTree):
            self._tree.leave(slots, verified, drafts)
        else:
            super().leave(slots, verified, drafts)


def _parents(batch: RoundBatch) -> torch.Tensor:
    assert batch.parents is not None, "mark sets the parents first"
    return batch.parents


def spine(parents: list[int], tokens: list[int], depth: int) -> list[int]:
    """Follow first children from the root, and return their tokens, padded with -1 to `depth`."""
    row: int | None = 0
    drafts: list[int] = []
    while row is not None and len(drafts) <= depth:
        drafts.append(tokens[row])
        row = next((child for child in range(row + 1, len(parents)) if parents[child] == row), None)
    return [*drafts[1:], *[-1] * (depth + 1 - len(drafts))]
