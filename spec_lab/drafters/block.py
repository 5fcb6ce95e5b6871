"""Drafts a chain or a tree from the slots of a block, which one pass of the body has run.

A head turns the slots into drafts. Each slot gives one level of a tree. The head scores a slot for all branches of the
level before at once, given each branch's token. If the head carries a state, each branch has its own. The body runs
once, so a tree costs it no more than a chain.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from spec_lab.acceptance.confidences import DraftConfidences
from spec_lab.core.draft_tree import DraftTree
from spec_lab.core.kv_cache import PagedKVCache
from spec_lab.core.prompts import PromptPack
from spec_lab.core.protocols import DrafterRequirements
from spec_lab.core.types import AttentionMetadata, DraftStep, Request, VerifiedRound
from spec_lab.drafters.growth import TreeShape
from spec_lab.drafters.picking import DraftedRows, DraftPicker
from spec_lab.drafters.siblings import Ranked, SiblingPicker
from spec_lab.models.blocks.confidence import ConfidenceHead
from spec_lab.models.blocks.heads import BlockHead, BlockRows, SlotWalk, at_column

Spans = Callable[[str], AbstractContextManager[None]]
"""Times a part of a drafter's work under the given name."""


@dataclass(slots=True)
class RunBlock:
    """The output of one block for each request: its slots, and the token [batch] before the first slot."""

    slots: BlockRows
    pending: torch.Tensor
    rows: DraftedRows


class BlockPass(Protocol):
    """Runs blocks, after prompts and after rounds.

    Attributes:
        num_draft_tokens: the number of slots that are drafted.
        head: turns slots into drafts.
    """

    num_draft_tokens: int
    requirements: DrafterRequirements
    head: BlockHead
    cache: PagedKVCache

    def of_prompts(self, pack: PromptPack) -> RunBlock | None:
        """Ingest chunks of prompts, and run a block for each prompt that ends; None if none ends."""
        ...

    def of_round(self, verified: VerifiedRound) -> RunBlock:
        """Catch up with a round, and run a block for each request."""
        ...

    def count_catchup(self, num_requests: int, num_live: int, num_verified: int) -> int:
        """Count the rows that a catch-up step computes."""
        ...


State = TypeVar("State")


class BlockDrafts(ABC, Generic[State]):
    """The common part of the block drafters for chains and trees."""

    def __init__(self, blocks: BlockPass, span: Spans) -> None:
        self.num_draft_tokens = blocks.num_draft_tokens
        self.requirements = blocks.requirements
        self.blocks = blocks
        self.cache = blocks.cache
        self._span = span
        self._first_column = torch.zeros(1, dtype=torch.int64, device=blocks.cache.device)

    def admit(self, slot: int, request: Request) -> None:
        """Do nothing: the pass keeps only KV rows of a slot, and rows past a slot's length are never read."""

    def ingest(self, pack: PromptPack) -> State | None:
        block = self.blocks.of_prompts(pack)
        return None if block is None else self._begin(block)

    def catch_up(self, verified: VerifiedRound) -> State:
        return self._begin(self.blocks.of_round(verified))

    def count_catchup(self, num_requests: int, num_live: int, num_verified: int) -> int:
        return self.blocks.count_catchup(num_requests, num_live, num_verified)

    @abstractmethod
    def first(self, walk: SlotWalk, block: RunBlock, column: torch.Tensor) -> State:
        """Draft from the first slot, `column` [1]."""

    def _begin(self, block: RunBlock) -> State:
        with self._span("head"):
            return self.first(self.blocks.head.begin(block.slots), block, self._first_column)


@dataclass(slots=True)
class BlockState:
    """A block's newest draft `tokens` [batch], and all drafts `ahead` [batch, slots] if they were made at once.

    Draft steps do not change any metadata, so `attention` is None.
    """

    tokens: torch.Tensor
    walk: SlotWalk
    rows: DraftedRows
    ahead: torch.Tensor | None = None
    attention: AttentionMetadata | None = None


class BlockDrafter(BlockDrafts[BlockState]):
    """Drafts a chain from the slots of a block."""

    def __init__(
        self,
        blocks: BlockPass,
        picker: DraftPicker,
        span: Spans,
        confidence: ConfidenceHead | None = None,
        confidences: DraftConfidences | None = None,
    ) -> None:
        """`confidences`: where the estimates of the model's `confidence` head are stored; None if the picker stores its
        own, or if none are stored."""
        assert confidences is None or confidence is not None
        super().__init__(blocks, span)
        self.picker = picker
        self._confidence = confidence
        self._confidences = confidences

    def first(self, walk: SlotWalk, block: RunBlock, column: torch.Tensor) -> BlockState:
        if self._confidences is not None:
            self._confidences.note(block.rows.slot_ids, self._sure(walk, block.pending, column))
        takes_likeliest = self.picker.takes_likeliest and self._confidences is None
        if takes_likeliest and (ahead := self.blocks.head.likeliest(walk)) is not None:
            return BlockState(ahead[:, 0], walk, block.rows, ahead)
        scores = self.blocks.head.scores(walk, block.pending, column)
        return BlockState(self.picker.pick(scores, walk.hidden, block.rows), walk, block.rows)

    def step(self, state: BlockState, step: DraftStep) -> None:
        """Pick the draft after the newest one."""
        if state.ahead is not None:
            state.tokens = at_column(state.ahead, step.column)
            return
        walk, rows = state.walk, state.rows
        if self._confidences is not None:
            self._confidences.note(rows.slot_ids, self._sure(walk, state.tokens, step.column), step.column)
        scores = self.blocks.head.scores(walk, state.tokens, step.column)
        state.tokens = self.picker.pick(scores, walk.hidden, rows, step.column)

    def kept_logits(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return self.picker.kept_logits(slot_ids)

    def _sure(self, walk: SlotWalk, previous: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """Ask the model's confidence head, which does not see the token that is about to be drafted."""
        assert self._confidence is not None
        return self._confidence(walk, previous, column)


@dataclass(slots=True)
class BlockTreeState:
    """The levels of a tree so far; `walk` has the head's state for the newest branches."""

    walk: SlotWalk
    rows: DraftedRows
    growth: Any


class BlockTreeDrafter(BlockDrafts[BlockTreeState]):
    """Drafts a tree from the slots of a block. The head can condition a branch's children on the branch's token."""

    def __init__(self, blocks: BlockPass, shape: TreeShape[Any], siblings: SiblingPicker, span: Spans) -> None:
        super().__init__(blocks, span)
        self.shape = shape
        self.siblings = siblings

    def first(self, walk: SlotWalk, block: RunBlock, column: torch.Tensor) -> BlockTreeState:
        ranked = self._below(walk, block.pending, DraftStep(0, column), block.rows)
        return BlockTreeState(walk, block.rows, self.shape.start(ranked, block.rows))

    def step(self, state: BlockTreeState, step: DraftStep) -> None:
        """Choose the branches of the newest level, and pick tokens of the next slot for each."""
        branches = self.shape.branch(state.growth, _by_request(state.walk))
        state.walk.state = branches.hidden
        self.shape.add(state.growth, self._below(state.walk, branches.tokens.reshape(-1), step, state.rows))

    def finish(self, state: BlockTreeState) -> DraftTree:
        return self.shape.finish(state.growth)

    def kept_logits(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return self.siblings.kept_logits(slot_ids)

    def _below(self, walk: SlotWalk, tokens: torch.Tensor, step: DraftStep, rows: DraftedRows) -> Ranked:
        """Pick tokens in the slot of `step` for branches whose newest tokens are `tokens` [batch * branches]."""
        scores = self.blocks.head.scores(walk, tokens, step.column)
        return self.siblings.pick(scores, _by_request(walk), rows, step.index)


def _by_request(walk: SlotWalk) -> torch.Tensor:
    """Return the head's state for the newest branches, [batch, branches, width]."""
    return walk.state.unflatten(0, (walk.hidden.shape[0], -1))
