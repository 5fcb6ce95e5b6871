"""The bounds of trees, and what they ask of the drafter."""

from __future__ import annotations

from spec_lab.menu.choices import DraftSampling
from spec_lab.menu.config import RunConfig

MAX_ROWS = 64


MAX_TOPK = 16


MAX_DEPTH = 16


def branches_are_drawn(config: RunConfig) -> bool:
    """Tell whether the drafts of a run are sampled."""
    sampling = getattr(config.drafter, "draft_sampling", DraftSampling.greedy)
    return bool(sampling != DraftSampling.greedy)
