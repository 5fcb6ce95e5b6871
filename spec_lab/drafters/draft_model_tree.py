"""A language model of its own drafts the branches of a tree."""

from __future__ import annotations

from typing import Any

import torch

from spec_lab.core.draft_tree import DraftTree
from spec_lab.core.kv_cache import PagedKVCache
from spec_lab.core.protocols import PrunePolicy, Target
from spec_lab.core.tree_protocols import TreeAttentionBackend
from spec_lab.core.types import AttentionMetadata, DraftStep, PromptChunk, VerifiedRound
from spec_lab.drafters.branching import BranchState, draft_level, start_branches
from spec_lab.drafters.catchup import CaughtUp
from spec_lab.drafters.draft_model import DraftModelCatchup
from spec_lab.drafters.growth import Branches, TreeShape
from spec_lab.drafters.picking import GivenDrafts
from spec_lab.pruning.selection import AllRows


class DraftModelTreeDrafter(GivenDrafts, DraftModelCatchup):
    """Keeps the protocol `TreeDrafter`. What a branch knows of its ancestors is their KV alone."""

    def __init__(
        self,
        shape: TreeShape[Any],
        model: Target,
        cache: PagedKVCache,
        backend: TreeAttentionBackend,
        prune: PrunePolicy,
    ) -> None:
        super().__init__(shape.depth, model, cache, backend, prune)
        self.shape = shape
        self._tree_backend = backend

    def ingest(self, chunk: PromptChunk) -> BranchState | None:
        live = self.take_chunk(chunk)
        return None if live is None else self._start(live)

    def catch_up(self, verified: VerifiedRound) -> BranchState:
        return self._start(self.take_round(verified))

    def step(self, state: BranchState, step: DraftStep) -> None:
        draft_level(self.shape, self.head, self._tree_backend, state, step, self._run_branches)

    def finish(self, state: BranchState) -> DraftTree:
        return self.shape.finish(state.growth)

    def _start(self, live: CaughtUp) -> BranchState:
        return start_branches(self.shape, self.head, live.hidden, live.attention)

    def _run_branches(self, branches: Branches, hidden: torch.Tensor, attention: AttentionMetadata) -> torch.Tensor:
        return self._forward(branches.tokens.reshape(-1), attention, AllRows())
