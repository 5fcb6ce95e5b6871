"""acceptance=typical: its keys, refusals, and the function that makes it."""

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
class TypicalConfig(AcceptanceConfig):
    """acceptance=typical (Medusa, lossy): accepts a draft with a probability above a bound that falls with the
    target's entropy."""

    name: str = "typical"
    epsilon: float = knob(0.3, "a draft with a probability above this always passes", least=0, most=1)
    delta: float = knob(0.09, "a draft with a probability above delta * exp(-entropy) passes too", least=0)


def build_rule(chosen: Chosen, options: TypicalConfig, build: RuleBuild) -> AcceptanceRule:
    """Make acceptance=typical."""
    from spec_lab.acceptance.token_laws import Typical

    return make_lossy(chosen, build, Typical(options.epsilon, options.delta))


ROW = RuleOption(
    name="typical",
    schema=TypicalConfig,
    build=build_rule,
    refusals=(strict_at_temperature_0,),
    takes_fewer_drafts=True,
)
