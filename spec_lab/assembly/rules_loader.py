"""This module makes the rule that `acceptance=` names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from spec_lab.acceptance.deterministic import DeterministicRule
from spec_lab.acceptance.distribution import SamplingParams
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.acceptance.phase import RelaxationPhase, RoundPhase, ThinkingMarkers, TokenPhase
from spec_lab.acceptance.rates import expand_mean_length
from spec_lab.acceptance.relaxed import DeltaForm, RatioForm, RelaxedForm, RelaxedThinkingAcceptance
from spec_lab.acceptance.relaxed_tree import RelaxedThinkingTreeAcceptance
from spec_lab.acceptance.traversal import TraversalAcceptance
from spec_lab.assembly import registry
from spec_lab.assembly.chosen import Chosen
from spec_lab.assembly.kernels import TORCH, Kernels
from spec_lab.assembly.rules import (
    RejectionConfig,
    RejectionMethodChoice,
    RelaxedFormChoice,
    RelaxedPhase,
    RelaxedThinkingConfig,
    StrictAcceptanceConfig,
    SyntheticConfig,
)
from spec_lab.config import AcceptanceConfig
from spec_lab.core.draft_paths import DraftPaths
from spec_lab.core.protocols import AcceptanceRule
from spec_lab.core.tree_protocols import TreeRule
from spec_lab.errors import UserError
from spec_lab.workloads.thinking import THINKING_MARKERS


@dataclass(frozen=True, slots=True)
class RuleContext:
    """The facts of a run that a deterministic rule has to know; a record keeps a part of them.

    Attributes:
        markers: of the thinking phase; None when the tokenizer has none.
        prefill_chunk: prompt rows a forward.
        kernels: what judges the drafts; of no interest for a record, which keeps the standing of the drafts itself.
    """

    num_slots: int
    markers: ThinkingMarkers | None
    eos_token_ids: frozenset[int]
    prefill_chunk: int
    device: torch.device
    kernels: Kernels = TORCH


@dataclass(frozen=True, slots=True)
class RuleBuild(RuleContext):
    """The parts of one engine that a rule is made of: one that draws also has seeds."""

    seeds: SlotSeeds = field(kw_only=True)


def build_rule(chosen: Chosen, build: RuleBuild) -> AcceptanceRule:
    """Make the rule of an engine, in its form for trees where the run has one."""
    if chosen.sizes is not None:
        return _build_tree_rule(chosen, build)
    option, options = chosen.rule, chosen.config.acceptance
    if option.build is not None:
        return option.build(chosen, options, build)
    assert option.judge is not None, "one of judge and build makes the rule"
    return option.judge(options, build)


def _build_tree_rule(chosen: Chosen, build: RuleBuild) -> AcceptanceRule:
    assert chosen.rule.walk is not None, "a rule that judges no trees is refused one"
    return chosen.rule.walk(chosen, chosen.config.acceptance, build)


def strict_tree_rule(chosen: Chosen, options: StrictAcceptanceConfig, build: RuleBuild) -> TreeRule:
    """Make acceptance=strict for trees."""
    return build.kernels.trees.strict()


def rejection_tree_rule(chosen: Chosen, options: RejectionConfig, build: RuleBuild) -> TreeRule:
    """Make acceptance=rejection for trees: acceptance.method=one_hot or traversal."""
    if options.method == RejectionMethodChoice.one_hot:
        return build.kernels.trees.one_hot(_sampling(chosen), build.seeds)
    tree: Any = chosen.config.tree
    paths, device = DraftPaths(tree.paths), build.device
    return TraversalAcceptance(paths, _sampling(chosen), build.seeds, device, tree.replacement)


def synthetic_tree_rule(chosen: Chosen, options: SyntheticConfig, build: RuleBuild) -> TreeRule:
    """Make acceptance=synthetic for trees."""
    return build.kernels.trees.synthetic(_rates(chosen, options), build.seeds, build.device)


def build_deterministic_rule(
    options: AcceptanceConfig, context: RuleContext, extensions: Sequence[str] = ()
) -> DeterministicRule:
    """Make a rule that decides without drawing, of this package or of `extensions`; UserError for any other."""
    return registry.load(tuple(extensions)).judge_of(options.name)(options, context)


def strict_rule(options: StrictAcceptanceConfig, context: RuleContext) -> DeterministicRule:
    """Make acceptance=strict."""
    return context.kernels.strict()


def relaxed_thinking_rule(options: RelaxedThinkingConfig, context: RuleContext) -> DeterministicRule:
    """Make the rule of acceptance=relaxed_thinking; UserError where the tokenizer has no thinking markers."""
    form, phase = _relaxation(options, context)
    return RelaxedThinkingAcceptance(form, options.topk, phase, context.kernels.standing)


def relaxed_thinking_tree_rule(chosen: Chosen, options: RelaxedThinkingConfig, build: RuleBuild) -> TreeRule:
    """Make acceptance=relaxed_thinking for trees."""
    form, phase = _relaxation(options, build)
    return RelaxedThinkingTreeAcceptance(form, options.topk, phase)


def _relaxation(options: RelaxedThinkingConfig, context: RuleContext) -> tuple[RelaxedForm, RelaxationPhase]:
    """Make what says how near a draft must be, and when that counts."""
    markers = context.markers
    if markers is None:
        raise UserError(
            f"acceptance=relaxed_thinking needs {_either_pair()} as tokens, and this target's tokenizer has none; use "
            "acceptance=strict"
        )
    form: RelaxedForm = (
        DeltaForm(options.delta) if options.form == RelaxedFormChoice.delta else RatioForm(options.ratio)
    )
    phase: RelaxationPhase = (
        TokenPhase(context.num_slots, markers, context.eos_token_ids, context.device)
        if options.phase == RelaxedPhase.token
        else RoundPhase(context.num_slots, markers, context.prefill_chunk, context.device)
    )
    return form, phase


def _either_pair() -> str:
    return " or ".join(f"{begin} and {end}" for begin, end in THINKING_MARKERS)


def rejection_rule(chosen: Chosen, options: RejectionConfig, build: RuleBuild) -> AcceptanceRule:
    """Make acceptance=rejection."""
    kernels = build.kernels
    return kernels.rejection(options.method, _sampling(chosen), build.seeds, not options.allow_lossy)


def synthetic_rule(chosen: Chosen, options: SyntheticConfig, build: RuleBuild) -> AcceptanceRule:
    """Make acceptance=synthetic."""
    return build.kernels.synthetic(_rates(chosen, options), build.seeds, build.device)


def _sampling(chosen: Chosen) -> SamplingParams:
    sampling = chosen.config.sampling
    return SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p)


def _rates(chosen: Chosen, options: SyntheticConfig) -> Sequence[float]:
    """Return the rate of each draft position, given or made of the mean length."""
    if options.rates is not None:
        return options.rates
    assert options.mean_length is not None
    return expand_mean_length(options.mean_length, chosen.config.drafter.num_draft_tokens)
