"""The values of the two pruning knobs, with a registry entry (row) for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_lab.core.pruning_protocols import Drop
from spec_lab.menu.option import CatchupPruningOption, PromptPruningOption

if TYPE_CHECKING:
    from spec_lab.core.pruning_protocols import CatchupPruning, PromptPruning


def all_rows() -> PromptPruning:
    """Make prune.prefill=all_rows."""
    from spec_lab.core.selection import AllPromptRows

    return AllPromptRows()


def last_row() -> PromptPruning:
    """Make prune.prefill=last_row."""
    from spec_lab.core.selection import LastPromptRow

    return LastPromptRow()


def nothing() -> CatchupPruning:
    """Make prune.catchup=none."""
    from spec_lab.core.selection import NoCatchupPruning

    return NoCatchupPruning()


def post_attention() -> CatchupPruning:
    """Make prune.catchup=post_attention."""
    from spec_lab.core.selection import PruneAfterAttention

    return PruneAfterAttention()


def pre_attention() -> CatchupPruning:
    """Make prune.catchup=pre_attention."""
    from spec_lab.core.selection import PruneBeforeAttention

    return PruneBeforeAttention()


ROWS = (
    PromptPruningOption(name="all_rows", make=all_rows),
    PromptPruningOption(name="last_row", make=last_row),
    CatchupPruningOption(name="none", make=nothing, drop=Drop.NOWHERE),
    CatchupPruningOption(name="post_attention", make=post_attention, drop=Drop.BEHIND_ATTENTION),
    CatchupPruningOption(name="pre_attention", make=pre_attention, drop=Drop.BEFORE_ATTENTION),
)
