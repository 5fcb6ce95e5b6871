"""acceptance=fuzzy: its keys, refusals, and the function that makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_lab.menu.choices import Choice
from spec_lab.menu.config import AcceptanceConfig, knob
from spec_lab.menu.option import RuleOption
from spec_lab.options.rules.between import make_lossy, strict_at_temperature_0

if TYPE_CHECKING:
    from spec_lab.core.protocols import AcceptanceRule
    from spec_lab.menu.chosen import Chosen
    from spec_lab.wiring.rules import RuleBuild


class FuzzyDivergence(Choice):
    """The measures of the distance between the drafter's distribution and the target's."""

    tv = "tv", "total variation"
    kl = "kl", "KL of the drafter's distribution from the target's, in nats"
    js = "js", "Jensen-Shannon divergence, in nats"


@dataclass
class FuzzyConfig(AcceptanceConfig):
    """acceptance=fuzzy (FSD, lossy): accepts a draft if the distributions of drafter and target are near each other."""

    name: str = "fuzzy"
    divergence: FuzzyDivergence = knob(FuzzyDivergence.js, "how the distance of target and drafter is measured")
    most: float = knob(0.2, "the largest divergence at which a draft is accepted; 0 is lossless", least=0)


def build_rule(chosen: Chosen, options: FuzzyConfig, build: RuleBuild) -> AcceptanceRule:
    """Make acceptance=fuzzy."""
    from spec_lab.acceptance.token_laws import Fuzzy, jensen_shannon, reverse_kl, total_variation

    divergences = {
        FuzzyDivergence.tv: total_variation,
        FuzzyDivergence.kl: reverse_kl,
        FuzzyDivergence.js: jensen_shannon,
    }
    return make_lossy(chosen, build, Fuzzy(divergences[options.divergence], options.most))


ROW = RuleOption(
    name="fuzzy",
    schema=FuzzyConfig,
    build=build_rule,
    refusals=(strict_at_temperature_0,),
    takes_fewer_drafts=True,
    keeps_the_law=lambda options: options.most == 0,
)
