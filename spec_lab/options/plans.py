"""The values of `drafter.plan`: how many drafts a launch verifies and makes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_lab.config.option import option

if TYPE_CHECKING:
    from spec_lab.build.lab import Lab
    from spec_lab.engine.plan import Plan


@option("drafter.plan", "none")
class NoPlan:
    """K drafts in every round."""

    def build(self, lab: Lab) -> Plan | None:
        return None


@option("drafter.plan", "given")
class Given:
    """The `num_draft_tokens` of each request's line, a number or "off"; K for lines without it."""

    def build(self, lab: Lab) -> Plan | None:
        from spec_lab.engine.plan import GivenPlan

        return GivenPlan(lab.run.drafter.num_draft_tokens)


@option("drafter.plan", "cost")
class Cost:
    """As many as bring the most tokens a second, by measured costs and measured acceptance; at most a line's own K."""

    def build(self, lab: Lab) -> Plan | None:
        from spec_lab.engine.cost_plan import CostPlan
        from spec_lab.engine.judged import ChainPositions, TreeRows

        sizes = lab.run.sizes
        chain = ChainPositions(lab.run.drafter.num_draft_tokens)
        drafts = chain if sizes is None else TreeRows(sizes.num_rows, sizes.depth)
        return CostPlan(lab.limits.num_slots, drafts, reads_confidences=lab.confidences is not None)
