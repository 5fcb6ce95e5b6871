"""The values of the two pruning knobs. `prune=none|prefill|post_attention|catchup` are presets of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from spec_lab.config.option import option
from spec_lab.core.pruning_protocols import Drop

if TYPE_CHECKING:
    from spec_lab.core.pruning_protocols import CatchupPruning, PromptPruning


@option("prune.prefill", "all_rows")
class AllRows:
    """Every prompt row goes through the whole target and drafter."""

    def build(self) -> PromptPruning:
        from spec_lab.core.selection import AllPromptRows

        return AllPromptRows()


@option("prune.prefill", "last_row")
class LastRow:
    """Past the last KV write, only the last row of a prompt goes on (llama.cpp #149)."""

    def build(self) -> PromptPruning:
        from spec_lab.core.selection import LastPromptRow

        return LastPromptRow()


class CatchupOption:
    """The base of the values of `prune.catchup`; `drop` is that of `PrunePolicy`."""

    drop: ClassVar[Drop | None] = None

    def build(self) -> CatchupPruning:
        """Make the pruning."""
        raise NotImplementedError


@option("prune.catchup", "none")
class NoPruning(CatchupOption):
    """Every verified row goes through the whole catch-up step."""

    drop = Drop.NOWHERE

    def build(self) -> CatchupPruning:
        from spec_lab.core.selection import NoCatchupPruning

        return NoCatchupPruning()


@option("prune.catchup", "post_attention")
class PostAttention(CatchupOption):
    """All rows attend, and one row a request goes on behind attention."""

    drop = Drop.BEHIND_ATTENTION

    def build(self) -> CatchupPruning:
        from spec_lab.core.selection import PruneAfterAttention

        return PruneAfterAttention()


@option("prune.catchup", "pre_attention")
class PreAttention(CatchupOption):
    """One row a request attends, after all KV is written (tokenspeed #217)."""

    drop = Drop.BEFORE_ATTENTION

    def build(self) -> CatchupPruning:
        from spec_lab.core.selection import PruneBeforeAttention

        return PruneBeforeAttention()
