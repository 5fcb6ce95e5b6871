"""acceptance=strict: its registry entry (row), and the functions that make it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import AcceptanceConfig
from spec_lab.menu.option import RuleOption

if TYPE_CHECKING:
    from spec_lab.acceptance.deterministic import DeterministicRule
    from spec_lab.core.tree_protocols import TreeRule
    from spec_lab.wiring.rules import RuleBuild, RuleContext


@dataclass
class StrictAcceptanceConfig(AcceptanceConfig):
    """acceptance=strict: longest prefix equal to the target's argmax, plus one token."""

    name: str = "strict"


def walk(chosen: Chosen, options: StrictAcceptanceConfig, build: RuleBuild) -> TreeRule:
    """Make acceptance=strict for trees."""
    from spec_lab.acceptance.tree import StrictTreeAcceptance

    return StrictTreeAcceptance(build.kernels)


def judge(options: StrictAcceptanceConfig, context: RuleContext) -> DeterministicRule:
    """Make acceptance=strict."""
    from spec_lab.acceptance.strict import StrictAcceptance

    return StrictAcceptance(context.kernels)


ROW = RuleOption(
    name="strict",
    schema=StrictAcceptanceConfig,
    judge=judge,
    greedy_only="compares with the argmax",
    keeps_greedy_text=True,
    walk=walk,
    takes_fewer_drafts=True,
    keeps_the_law=lambda options: True,
)
