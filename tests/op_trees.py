"""Random trees of drafts, for tests of what walks them."""

from __future__ import annotations

import random

import torch

from tests.kernel_lab import DEVICE, randn


def draw_trees(batch: int, num_rows: int, depth: int) -> torch.Tensor:
    """Parents [batch, N] of trees at most `depth` deep; some rows hold no draft."""
    draw, trees = random.Random(num_rows), []
    for _ in range(batch):
        parents, depths = [0], [0]
        for row in range(1, num_rows):
            below = [other for other in range(row) if depths[other] < depth and (not other or parents[other] != other)]
            parent = draw.choice(below) if draw.random() < 0.9 else row
            parents.append(parent)
            depths.append(0 if parent == row else depths[parent] + 1)
        trees.append(parents)
    return torch.tensor(trees, device=DEVICE)


def likely_drafts(parents: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Drafts of which about two in three are what the target chose behind their parents."""
    right = best.gather(1, parents)
    is_right = randn(*parents.shape, seed=3) > -0.4
    return torch.where(is_right, right, (right + 1) % 7)
