"""One draft layer is reused for the branches of a tree (EAGLE-2's drafting with EAGLE-3's head, or an MTP module)."""

from __future__ import annotations

from typing import Any

import torch

from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.pruning_protocols import PrunePolicy
from spec_lab.core.selection import AllRows
from spec_lab.core.tree_protocols import TreeAttentionBackend
from spec_lab.core.types import AttentionMetadata, FeatureSpec
from spec_lab.drafters.branching import BranchDrafter
from spec_lab.drafters.growth import Branches, TreeShape
from spec_lab.drafters.recurrent import RecurrentCatchup, RecurrentHead
from spec_lab.drafters.siblings import SiblingPicker


class RecurrentTreeDrafter(RecurrentCatchup, BranchDrafter):
    """Drafts a tree with a layer that is reused."""

    def __init__(
        self,
        shape: TreeShape[Any],
        siblings: SiblingPicker,
        head: RecurrentHead,
        features: FeatureSpec,
        cache: LayerCache,
        backend: TreeAttentionBackend,
        prune: PrunePolicy,
    ) -> None:
        super().__init__(shape.depth, head, features, cache, backend, prune)
        self.shape = shape
        self.siblings = siblings
        self.tree_backend = backend

    def run_branches(self, branches: Branches, attention: AttentionMetadata) -> torch.Tensor:
        return self.head.forward(branches.tokens.reshape(-1), branches.hidden, self.cache, attention, AllRows())
