"""Whether requests may offer fewer than K drafts, and K of a tree. This module does not import torch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spec_lab.config.run import Run

MAX_DRAFT_TOKENS = 16


def fewer_drafts(run: Run) -> str | None:
    """Return the override by which a request may offer fewer than K drafts; None if all are offered."""
    if run.drafter.plan != "none" and run.drafter.drafts:
        return f"drafter.plan={run.drafter.plan}"
    return f"drafter={run.drafter.name}" if run.drafter.drafts_on_host else None


def with_k(run: Run) -> Run:
    """Return the run with the depth of its tree as K, if K has its default. A typed K that differs is refused."""
    drafter, sizes = run.drafter, run.sizes
    usual = next(field.default for field in dataclasses.fields(drafter) if field.name == "num_draft_tokens")
    if sizes is None or not drafter.drafts or drafter.num_draft_tokens != usual:
        return run
    return run.with_parts(drafter=dataclasses.replace(drafter, num_draft_tokens=sizes.depth))
