"""acceptance=synthetic: its keys, refusals, and the functions that make it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spec_lab.acceptance.rates import check_rates, expand_mean_length
from spec_lab.core.errors import UserError
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import AcceptanceConfig, RunConfig, knob
from spec_lab.menu.option import RuleOption

if TYPE_CHECKING:
    from spec_lab.core.protocols import AcceptanceRule
    from spec_lab.core.tree_protocols import TreeRule
    from spec_lab.wiring.rules import RuleBuild


@dataclass
class SyntheticConfig(AcceptanceConfig):
    """acceptance=synthetic: set rates, for speed studies; the output is neither model's text."""

    name: str = "synthetic"
    mean_length: float | None = knob(2.5, "acceptance length to impose, from 1 to K + 1; null if rates are given")
    rates: list[float] | None = knob(None, "unconditional rate of each draft position, not increasing")


def synthetic_rates(config: RunConfig) -> str | None:
    """Exactly one of the two knobs gives the rates, and a rule can impose them."""
    rule: Any = config.acceptance
    if rule.rates is None and rule.mean_length is None:
        return (
            "acceptance.mean_length=null acceptance.rates=null: neither sets the rates; use acceptance.mean_length=2.5"
        )
    if rule.rates is not None and rule.mean_length is not None:
        return (
            f"acceptance.mean_length={rule.mean_length} and acceptance.rates={rule.rates}: both set the rates; set one "
            "of them to null"
        )
    try:
        if rule.rates is None:
            expand_mean_length(rule.mean_length, config.drafter.num_draft_tokens)
        else:
            check_rates(rule.rates, config.drafter.num_draft_tokens)
    except UserError as error:
        return str(error)
    return None


def walk(chosen: Chosen, options: SyntheticConfig, build: RuleBuild) -> TreeRule:
    """Make acceptance=synthetic for trees."""
    from spec_lab.acceptance.tree import SyntheticTreeAcceptance

    return SyntheticTreeAcceptance(_rates(chosen, options), build.seeds, build.device, build.kernels)


def build_rule(chosen: Chosen, options: SyntheticConfig, build: RuleBuild) -> AcceptanceRule:
    """Make acceptance=synthetic."""
    from spec_lab.acceptance.synthetic import SyntheticAcceptance

    return SyntheticAcceptance(_rates(chosen, options), build.seeds, build.device, build.kernels)


def _rates(chosen: Chosen, options: SyntheticConfig) -> Sequence[float]:
    """Return the acceptance rate of each draft position, as given or computed from the mean length."""
    if options.rates is not None:
        return options.rates
    assert options.mean_length is not None
    return expand_mean_length(options.mean_length, chosen.config.drafter.num_draft_tokens)


ROW = RuleOption(
    name="synthetic",
    schema=SyntheticConfig,
    build=build_rule,
    greedy_only="ends a round with the argmax",
    refusals=(synthetic_rates,),
    walk=walk,
    takes_fewer_drafts=True,
)
