"""The acceptance rules: their keys, what they refuse, and a row for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spec_lab.acceptance.rates import check_rates, expand_mean_length
from spec_lab.assembly.deferred import Deferred
from spec_lab.assembly.drafters.trained import DraftSampling
from spec_lab.assembly.option import RuleOption
from spec_lab.assembly.trees import StaticTreeConfig
from spec_lab.config import AcceptanceConfig, Choice, KernelSet, RunConfig, TreeConfig, knob
from spec_lab.errors import UserError

LOADER = "spec_lab.assembly.rules_loader"


class RelaxedFormChoice(Choice):
    """The ways to say how near a draft must be to the likeliest token."""

    delta = "delta", "p >= p_top1 - delta"
    ratio = "ratio", "p >= p_top1 * ratio"


class RelaxedPhase(Choice):
    """The parts of a text in which relaxed acceptance is on."""

    token = "token", "by the markers before each token"
    round = "round", "by those before the round, as TensorRT-LLM"


class RejectionMethodChoice(Choice):
    """The ways to judge sampled drafts."""

    standard = "standard", "reads the draft distribution"
    one_hot = "one_hot", "greedy drafts"
    block = "block"
    traversal = "traversal", "sampled siblings of tree=static"


@dataclass
class StrictAcceptanceConfig(AcceptanceConfig):
    """acceptance=strict: longest prefix equal to the target's argmax, plus one token."""

    name: str = "strict"


@dataclass
class RelaxedThinkingConfig(AcceptanceConfig):
    """acceptance=relaxed_thinking: near misses count while the model thinks. Lossy."""

    name: str = "relaxed_thinking"
    form: RelaxedFormChoice = knob(RelaxedFormChoice.delta, "how near a draft must be to the likeliest token")
    topk: int = knob(10, "a draft must be among this many likeliest tokens; 1 is strict")
    delta: float = knob(0.6, "largest difference of probabilities; acceptance.form=delta only")
    ratio: float = knob(0.5, "least ratio of probabilities; acceptance.form=ratio only")
    phase: RelaxedPhase = knob(RelaxedPhase.token, "when it relaxes")


@dataclass
class RejectionConfig(AcceptanceConfig):
    """acceptance=rejection: lossless sampling."""

    name: str = "rejection"
    method: RejectionMethodChoice = knob(RejectionMethodChoice.standard, "how drafts are judged")
    allow_lossy: bool = knob(False, "let standard and block read the head's probabilities of greedy drafts: biased")


@dataclass
class SyntheticConfig(AcceptanceConfig):
    """acceptance=synthetic: set rates, for speed studies; the output is neither model's text."""

    name: str = "synthetic"
    mean_length: float | None = knob(2.5, "acceptance length to impose, 1 to K + 1; null when rates are given")
    rates: list[float] | None = knob(None, "unconditional rate of each draft position, not increasing")


def relaxed_knobs(config: RunConfig) -> str | None:
    """topk, delta and ratio are within their bounds."""
    rule: Any = config.acceptance
    if rule.topk < 1:
        return f"acceptance.topk={rule.topk} leaves no candidate; use acceptance.topk=1 (strict) or more"
    if not 0 <= rule.delta <= 1:
        return f"acceptance.delta={rule.delta} is no difference of probabilities; use acceptance.delta=0.6"
    if not 0 < rule.ratio <= 1:
        return f"acceptance.ratio={rule.ratio} is no ratio to the largest probability; use acceptance.ratio=0.5"
    return None


def the_other_form_is_left_alone(config: RunConfig) -> str | None:
    """The number of the form that is not chosen is not read."""
    rule: Any = config.acceptance
    unread = "ratio" if rule.form == RelaxedFormChoice.delta else "delta"
    value, default = getattr(rule, unread), getattr(RelaxedThinkingConfig, unread)
    if value == default:
        return None
    return (
        f"acceptance.{unread}={value} is not read by acceptance.form={rule.form}; leave it out or use "
        f"acceptance.form={unread}"
    )


def rejection_reads_the_draft_distribution(config: RunConfig) -> str | None:
    """standard and block divide by the probability a draft was sampled with; a greedy draft's is 1, not the head's.

    With the head's probabilities under greedy drafts the output is biased: only acceptance.allow_lossy lets that run.
    block with one-hot q would be lossless, and accept what one_hot accepts in expectation: refused as pointless.
    one_hot holds for every draft, sampled ones included (tests/test_rejection.py enumerates it): it passes.
    """
    rule: Any = config.acceptance
    if config.drafter.num_draft_tokens == 0 or rule.method == RejectionMethodChoice.one_hot:
        return None
    if not hasattr(config.drafter, "draft_sampling"):
        return (
            f"acceptance.method={rule.method} reads draft probabilities, and drafter={config.drafter.name} has none; "
            "use acceptance.method=one_hot"
        )
    is_greedy = config.drafter.draft_sampling == DraftSampling.greedy
    if config.sampling.temperature > 0 and is_greedy and not (rule.allow_lossy and _may_be_lossy(rule)):
        biased = ", or acceptance.allow_lossy=true for a biased output" if _may_be_lossy(rule) else ""
        return (
            f"acceptance.method={rule.method} with drafter.draft_sampling=greedy divides by probabilities the drafts "
            f"were not drawn with; use drafter.draft_sampling=distribution, acceptance.method=one_hot{biased}"
        )
    if config.sampling.temperature <= 0:
        return (
            f"acceptance.method={rule.method} needs sampled drafts, and sampling.temperature=0 has none; "
            "use acceptance.method=one_hot or acceptance=strict"
        )
    return None


def _may_be_lossy(rule: Any) -> bool:
    """Tell whether a method can read the head's probabilities of greedy drafts."""
    return rule.method in (RejectionMethodChoice.standard, RejectionMethodChoice.block)


def lossy_draft_option(config: RunConfig) -> str | None:
    """`acceptance.allow_lossy` has no meaning where nothing is lossy."""
    rule: Any = config.acceptance
    if not rule.allow_lossy:
        return None
    is_greedy = getattr(config.drafter, "draft_sampling", None) == DraftSampling.greedy
    if _may_be_lossy(rule) and is_greedy:
        return None
    return (
        "acceptance.allow_lossy=true has nothing to allow: only greedy drafts under acceptance.method=standard or "
        "block are lossy; use acceptance.allow_lossy=false"
    )


def block_verification_has_no_kernel(config: RunConfig) -> str | None:
    """Block verification stays in torch."""
    rule: Any = config.acceptance
    if config.kernels != KernelSet.triton or rule.method != RejectionMethodChoice.block:
        return None
    return "acceptance.method=block has no kernel in kernels=triton; use kernels=torch or acceptance.method=standard"


def shape_of_drafts_fits_the_method(config: RunConfig) -> str | None:
    """Traversal verification reads a tree, standard and block a chain, and one_hot either."""
    rule: Any = config.acceptance
    is_chain, judges_trees = config.tree.name == TreeConfig.name, rule.method == RejectionMethodChoice.traversal
    if rule.method == RejectionMethodChoice.one_hot or is_chain != judges_trees:
        return None
    if is_chain:
        return (
            "acceptance.method=traversal judges trees, and is acceptance.method=block on a chain; use "
            "acceptance.method=block or tree=static"
        )
    return (
        f"acceptance.method={rule.method} judges chains of drawn drafts, no tree={config.tree.name}; use "
        "acceptance.method=traversal with tree=static, acceptance.method=one_hot or tree=none"
    )


def drafts_of_a_tree_are_drawn_in_its_shape(config: RunConfig) -> str | None:
    """A tree whose shape follows from its drafts is drawn from another law than the one that would be read."""
    rule: Any = config.acceptance
    if rule.method != RejectionMethodChoice.traversal or config.tree.name in (TreeConfig.name, StaticTreeConfig.name):
        return None
    return (
        f"acceptance.method=traversal with tree={config.tree.name}, whose shape follows from its drafts, would be "
        "biased; use tree=static, or acceptance.method=one_hot"
    )


def synthetic_rates(config: RunConfig) -> str | None:
    """The rates are some that a rule can impose, and one of the two knobs gives them."""
    rule: Any = config.acceptance
    if (rule.rates is None) == (rule.mean_length is None):
        return (
            f"acceptance.mean_length={rule.mean_length} and acceptance.rates={rule.rates}: one of them sets the rates; "
            "set the other to null"
        )
    try:
        if rule.rates is None:
            expand_mean_length(rule.mean_length, config.drafter.num_draft_tokens)
        else:
            check_rates(rule.rates, config.drafter.num_draft_tokens)
    except UserError as error:
        return str(error)
    return None


OPTIONS = (
    RuleOption(
        name="strict",
        schema=StrictAcceptanceConfig,
        judge=Deferred(LOADER, "strict_rule"),
        greedy_only="compares with the argmax",
        keeps_greedy_text=True,
        walk=Deferred(LOADER, "strict_tree_rule"),
        takes_fewer_drafts=True,
    ),
    RuleOption(
        name="relaxed_thinking",
        schema=RelaxedThinkingConfig,
        judge=Deferred(LOADER, "relaxed_thinking_rule"),
        greedy_only="measures from the argmax of the raw logits",
        refusals=(relaxed_knobs, the_other_form_is_left_alone),
        walk=Deferred(LOADER, "relaxed_thinking_tree_rule"),
        takes_fewer_drafts=True,
    ),
    RuleOption(
        name="rejection",
        schema=RejectionConfig,
        build=Deferred(LOADER, "rejection_rule"),
        refusals=(
            rejection_reads_the_draft_distribution,
            lossy_draft_option,
            block_verification_has_no_kernel,
            shape_of_drafts_fits_the_method,
            drafts_of_a_tree_are_drawn_in_its_shape,
        ),
        walk=Deferred(LOADER, "rejection_tree_rule"),
        takes_fewer_drafts=True,
    ),
    RuleOption(
        name="synthetic",
        schema=SyntheticConfig,
        build=Deferred(LOADER, "synthetic_rule"),
        greedy_only="ends a round with the argmax",
        refusals=(synthetic_rates,),
        walk=Deferred(LOADER, "synthetic_tree_rule"),
        takes_fewer_drafts=True,
    ),
)
