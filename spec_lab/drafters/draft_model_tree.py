"""A language model of its own drafts the branches of a tree."""

from __future__ import annotations

from typing import Any

import torch

from spec_lab.core.kv_cache import PagedKVCache
from spec_lab.core.protocols import Target
from spec_lab.core.pruning_protocols import PrunePolicy
from spec_lab.core.selection import AllRows
from spec_lab.core.tree_protocols import TreeAttentionBackend
from spec_lab.core.types import AttentionMetadata
from spec_lab.drafters.branching import BranchDrafter
from spec_lab.drafters.draft_model import DraftModelCatchup
from spec_lab.drafters.growth import Branches, TreeShape
from spec_lab.drafters.siblings import SiblingPicker


class DraftModelTreeDrafter(DraftModelCatchup, BranchDrafter):
    """Drafts a tree with a small model. What a branch knows of its ancestors is their KV alone."""

    def __init__(
        self,
        shape: TreeShape[Any],
        siblings: SiblingPicker,
        model: Target,
        cache: PagedKVCache,
        backend: TreeAttentionBackend,
        prune: PrunePolicy,
    ) -> None:
        super().__init__(shape.depth, model, cache, backend, prune)
        self.shape = shape
        self.siblings = siblings
        self.tree_backend = backend

    def run_branches(self, branches: Branches, attention: AttentionMetadata) -> torch.Tensor:
        return self._forward(branches.tokens.reshape(-1), attention, AllRows())
