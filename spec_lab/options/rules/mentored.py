"""acceptance=mentored: its keys, refusals, and the function that makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_lab.menu.config import AcceptanceConfig, knob
from spec_lab.menu.option import RuleOption
from spec_lab.options.rules.between import make_lossy, strict_at_temperature_0

if TYPE_CHECKING:
    from spec_lab.core.protocols import AcceptanceRule
    from spec_lab.menu.chosen import Chosen
    from spec_lab.wiring.rules import RuleBuild


@dataclass
class MentoredConfig(AcceptanceConfig):
    """acceptance=mentored: accepts as many drafts as a bound on the KL divergence from the target allows. Lossy."""

    name: str = "mentored"
    bound: float = knob(
        0.1, "largest KL of the emitted distribution from the target's, in nats a token; 0 is lossless", least=0
    )


def build_rule(chosen: Chosen, options: MentoredConfig, build: RuleBuild) -> AcceptanceRule:
    """Make the rule of acceptance=mentored."""
    from spec_lab.acceptance.token_laws import Mentored, OverlapLaw

    return make_lossy(chosen, build, OverlapLaw(Mentored(options.bound)))


ROW = RuleOption(
    name="mentored",
    schema=MentoredConfig,
    build=build_rule,
    refusals=(strict_at_temperature_0,),
    takes_fewer_drafts=True,
    keeps_the_law=lambda options: options.bound == 0,
)
