"""Pruning: the presets of `prune`, and the values of its two knobs, which can also be set by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from spec_lab.config.option import option
from spec_lab.config.run import PruneConfig

if TYPE_CHECKING:
    from spec_lab.core.kept import Drop, PromptPruning


@option("prune", "prefill")
class Prefill(PruneConfig):
    """Of a prompt only the rows that are read go on."""

    prefill: str = "last_row"


@option("prune", "post_attention")
class PrefillAndPostAttention(Prefill):
    """As prefill; the catch-up step drops all but one row a request after attention."""

    catchup: str = "post_attention"


@option("prune", "catchup")
class PrefillAndPreAttention(Prefill):
    """As prefill; in the catch-up step one row a request attends, after all KV is written."""

    catchup: str = "pre_attention"


@option("prune.prefill", "all_rows")
class AllRows:
    """Every prompt row goes through the whole target and drafter."""

    def build(self) -> PromptPruning:
        from spec_lab.core.kept import AllPromptRows

        return AllPromptRows()


@option("prune.prefill", "last_row")
class LastRow:
    """Past the last KV write, only the last row of a prompt goes on (llama.cpp #149)."""

    def build(self) -> PromptPruning:
        from spec_lab.core.kept import LastPromptRow

        return LastPromptRow()


@option("prune.catchup", "none")
class NoPruning:
    """Every verified row goes through the whole catch-up step."""

    def build(self) -> Callable[[int], Drop]:
        from spec_lab.core.kept import Drop

        return lambda num_requests: Drop.AFTER_LAYER


@option("prune.catchup", "post_attention")
class PostAttention:
    """All rows attend, and one row a request goes on behind attention."""

    def build(self) -> Callable[[int], Drop]:
        from spec_lab.core.kept import Drop

        return lambda num_requests: Drop.AFTER_ATTENTION


@option("prune.catchup", "pre_attention")
class PreAttention:
    """One row a request attends, after all KV is written (tokenspeed #217)."""

    def build(self) -> Callable[[int], Drop]:
        from spec_lab.core.kept import Drop

        return lambda num_requests: Drop.BEFORE_ATTENTION
