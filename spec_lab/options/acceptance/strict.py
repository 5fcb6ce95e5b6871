"""acceptance=strict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_lab.config.groups import AcceptanceConfig
from spec_lab.config.option import option

if TYPE_CHECKING:
    from spec_lab.acceptance.strict import StrictAcceptance
    from spec_lab.build.lab import Lab, RuleFacts
    from spec_lab.core.protocols import AcceptanceRule


@option("acceptance", "strict")
class Strict(AcceptanceConfig):
    """The longest prefix equal to the target's argmax, plus one token."""

    greedy_only = "compares with the argmax"
    keeps_greedy_text = True
    takes_fewer_drafts = True
    judges_trees = True
    keeps_the_law = True

    def build(self, lab: Lab) -> AcceptanceRule:
        from spec_lab.acceptance.tree import StrictTreeAcceptance

        return self.judge(lab.rule_facts) if lab.run.sizes is None else StrictTreeAcceptance(lab.kernels)

    def judge(self, facts: RuleFacts) -> StrictAcceptance:
        from spec_lab.acceptance.strict import StrictAcceptance

        return StrictAcceptance(facts.kernels)
