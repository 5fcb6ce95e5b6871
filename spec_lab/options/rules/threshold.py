"""acceptance=threshold: its keys, refusals, and the function that makes it."""

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
class ThresholdConfig(AcceptanceConfig):
    """acceptance=threshold: two thresholds of probability (SGLang). Lossy below 1."""

    name: str = "threshold"
    single: float = knob(1.0, "a draft of this probability or more always passes", above=0, most=1)
    acc: float = knob(0.7, "others pass with probability p / acc; 1 is lossless", above=0, most=1)


def build_rule(chosen: Chosen, options: ThresholdConfig, build: RuleBuild) -> AcceptanceRule:
    """Make acceptance=threshold."""
    from spec_lab.acceptance.token_laws import Thresholds

    return make_lossy(chosen, build, Thresholds(options.single, options.acc))


ROW = RuleOption(
    name="threshold",
    schema=ThresholdConfig,
    build=build_rule,
    refusals=(strict_at_temperature_0,),
    takes_fewer_drafts=True,
    keeps_the_law=lambda options: options.single >= 1 and options.acc >= 1,
)
