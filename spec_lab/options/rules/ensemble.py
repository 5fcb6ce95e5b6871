"""acceptance=ensemble: its keys, and the function that makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_lab.menu.config import AcceptanceConfig, knob
from spec_lab.menu.option import RuleOption
from spec_lab.options.rules.between import make_lossy

if TYPE_CHECKING:
    from spec_lab.core.protocols import AcceptanceRule
    from spec_lab.menu.chosen import Chosen
    from spec_lab.wiring.rules import RuleBuild


@dataclass
class EnsembleConfig(AcceptanceConfig):
    """acceptance=ensemble (transformers, lossy): exact verification against a mixture of target and drafter."""

    name: str = "ensemble"
    weight: float = knob(0.8, "weight of the target in the mixture; 1 is lossless", least=0, most=1)


def build_rule(chosen: Chosen, options: EnsembleConfig, build: RuleBuild) -> AcceptanceRule:
    """Make acceptance=ensemble."""
    from spec_lab.acceptance.token_laws import Ensemble, OverlapLaw

    return make_lossy(chosen, build, OverlapLaw(Ensemble(options.weight)))


ROW = RuleOption(
    name="ensemble",
    schema=EnsembleConfig,
    build=build_rule,
    takes_fewer_drafts=True,
    keeps_the_law=lambda options: options.weight == 1,
)
