"""The values of the two pruning knobs: a row for each."""

from __future__ import annotations

from spec_lab.assembly.deferred import Deferred
from spec_lab.assembly.option import CatchupPruningOption, PromptPruningOption

LOADER = "spec_lab.pruning.policy"

PROMPT_OPTIONS = (
    PromptPruningOption(name="all_rows", make=Deferred(LOADER, "AllPromptRows")),
    PromptPruningOption(name="last_row", make=Deferred(LOADER, "LastPromptRow")),
)
CATCHUP_OPTIONS = (
    CatchupPruningOption(name="none", make=Deferred(LOADER, "NoCatchupPruning"), in_one_call=True),
    CatchupPruningOption(name="post_attention", make=Deferred(LOADER, "PruneAfterAttention")),
    CatchupPruningOption(name="pre_attention", make=Deferred(LOADER, "PruneBeforeAttention"), in_one_call=True),
)
