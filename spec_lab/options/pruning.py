"""The values of the two pruning knobs. `prune=none|prefill|post_attention|catchup` are presets of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_lab.config.option import option
from spec_lab.core.pruning import Drop

if TYPE_CHECKING:
    from spec_lab.core.kept import PromptPruning


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


class CatchupOption:
    """The base of the values of `prune.catchup`."""

    def drop(self, num_requests: int) -> Drop:
        """Return where a catch-up step of `num_requests`, padding included, drops all rows but one a request."""
        raise NotImplementedError


@option("prune.catchup", "none")
class NoPruning(CatchupOption):
    """Every verified row goes through the whole catch-up step."""

    def drop(self, num_requests: int) -> Drop:
        return Drop.AFTER_LAYER


@option("prune.catchup", "post_attention")
class PostAttention(CatchupOption):
    """All rows attend, and one row a request goes on behind attention."""

    def drop(self, num_requests: int) -> Drop:
        return Drop.AFTER_ATTENTION


@option("prune.catchup", "pre_attention")
class PreAttention(CatchupOption):
    """One row a request attends, after all KV is written (tokenspeed #217)."""

    def drop(self, num_requests: int) -> Drop:
        return Drop.BEFORE_ATTENTION
