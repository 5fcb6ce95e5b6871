"""Makes the rule for `acceptance=`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from spec_lab.acceptance.deterministic import DraftJudge
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.acceptance.phase import ThinkingMarkers
from spec_lab.core.protocols import AcceptanceRule
from spec_lab.menu import registry
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import AcceptanceConfig
from spec_lab.menu.registry import made
from spec_lab.operators.kernel_set import TORCH_FORMS, KernelSet


@dataclass(frozen=True, slots=True)
class RuleContext:
    """The facts of a run that a deterministic rule needs; some of them are recorded for re-scoring.

    Attributes:
        markers: markers of the thinking phase; None if the tokenizer has none.
        prefill_chunk: the most rows of one prompt in a forward.
        kernels: the kernels that judge drafts; not used for a recorded run, which has the results already.
    """

    num_slots: int
    markers: ThinkingMarkers | None
    eos_token_ids: frozenset[int]
    prefill_chunk: int
    device: torch.device
    kernels: KernelSet = TORCH_FORMS


@dataclass(frozen=True, slots=True)
class RuleBuild(RuleContext):
    """The parts of one engine that a rule is made from, which include seeds for rules that draw."""

    seeds: SlotSeeds = field(kw_only=True)


def build_rule(chosen: Chosen, build: RuleBuild) -> AcceptanceRule:
    """Make the rule of an engine, in its form for trees if the run has a tree."""
    if chosen.sizes is not None:
        return _build_tree_rule(chosen, build)
    option, options = chosen.rule, chosen.config.acceptance
    if option.build is not None:
        return made(option.build(chosen, options, build), option, "build")
    assert option.judge is not None, "one of judge and build makes the rule"
    return made(option.judge(options, build), option, "judge")


def _build_tree_rule(chosen: Chosen, build: RuleBuild) -> AcceptanceRule:
    assert chosen.rule.walk is not None, "a tree with a rule for chains is refused earlier"
    return made(chosen.rule.walk(chosen, chosen.config.acceptance, build), chosen.rule, "walk")


def build_deterministic_rule(
    options: AcceptanceConfig, context: RuleContext, extensions: Sequence[str] = ()
) -> DraftJudge:
    """Make a rule that decides without drawing, from this package or from `extensions`; UserError for other rules."""
    return registry.load(tuple(extensions)).judge_of(options.name)(options, context)
