"""acceptance=cascade: its keys, refusals, and the function that makes it."""

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
class CascadeConfig(AcceptanceConfig):
    """acceptance=cascade: drafts nearly as likely as the likeliest token pass, others are judged exactly. Lossy."""

    name: str = "cascade"
    alpha: float = knob(
        0.5, "a draft passes if its probability is at least (1 - alpha) times the largest", least=0, most=1
    )


def build_rule(chosen: Chosen, options: CascadeConfig, build: RuleBuild) -> AcceptanceRule:
    """Make acceptance=cascade."""
    from spec_lab.acceptance.token_laws import Cascade

    return make_lossy(chosen, build, Cascade(options.alpha))


ROW = RuleOption(
    name="cascade",
    schema=CascadeConfig,
    build=build_rule,
    refusals=(strict_at_temperature_0,),
    takes_fewer_drafts=True,
)
