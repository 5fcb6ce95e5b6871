"""acceptance=rejection: its keys, refusals, and the functions that make it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spec_lab.menu.choices import Choice, DraftSampling, KernelsChoice
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import AcceptanceConfig, RunConfig, TreeConfig, knob
from spec_lab.menu.option import RuleOption
from spec_lab.options.trees.static import StaticTreeConfig

if TYPE_CHECKING:
    from spec_lab.acceptance.distribution import SamplingParams
    from spec_lab.core.protocols import AcceptanceRule
    from spec_lab.core.tree_protocols import TreeRule
    from spec_lab.wiring.rules import RuleBuild


class RejectionMethodChoice(Choice):
    """The methods of judging drafts in lossless sampling."""

    standard = "standard", "reads the draft distribution"
    one_hot = "one_hot", "takes a draft's probability as 1, as for greedy drafts"
    block = "block"
    traversal = "traversal", "sampled siblings of tree=static"


@dataclass
class RejectionConfig(AcceptanceConfig):
    """acceptance=rejection: lossless sampling, unless acceptance.allow_lossy is set."""

    name: str = "rejection"
    method: RejectionMethodChoice = knob(RejectionMethodChoice.standard, "how drafts are judged")
    allow_lossy: bool = knob(
        False, "let standard and block use the head's probabilities of greedy drafts, which is biased"
    )


def rejection_reads_the_draft_distribution(config: RunConfig) -> str | None:
    """Methods must fit how drafts are picked. standard and block divide by the probability that a draft was sampled
    with, which is 1 for a greedy draft. Dividing by the head's probability instead would bias the output, which is only
    allowed with acceptance.allow_lossy.

    block with probability 1 would be lossless, but accept as much as one_hot in expectation, so it is refused as
    pointless. one_hot is correct for all drafts, including sampled ones (tests/test_rejection.py enumerates this).
    """
    rule: Any = config.acceptance
    if config.drafter.num_draft_tokens == 0 or rule.method == RejectionMethodChoice.one_hot:
        return None
    if not hasattr(config.drafter, "draft_sampling"):
        return (
            f"acceptance.method={rule.method} reads draft probabilities, but drafter={config.drafter.name} has none; "
            "use acceptance.method=one_hot"
        )
    is_greedy = config.drafter.draft_sampling == DraftSampling.greedy
    if config.sampling.temperature > 0 and is_greedy and not (rule.allow_lossy and _may_be_lossy(rule)):
        biased = ", or acceptance.allow_lossy=true for a biased output" if _may_be_lossy(rule) else ""
        return (
            f"acceptance.method={rule.method} with drafter.draft_sampling=greedy divides by other probabilities than "
            f"those of the draws; use drafter.draft_sampling=distribution, acceptance.method=one_hot{biased}"
        )
    if config.sampling.temperature <= 0:
        return (
            f"acceptance.method={rule.method} needs sampled drafts, but sampling.temperature=0 has none; use "
            "acceptance.method=one_hot or acceptance=strict"
        )
    return None


def _may_be_lossy(rule: Any) -> bool:
    """Return whether a method can use the head's probabilities of greedy drafts."""
    return rule.method in (RejectionMethodChoice.standard, RejectionMethodChoice.block)


def lossy_draft_option(config: RunConfig) -> str | None:
    """`acceptance.allow_lossy` is only set if the method can be lossy and the drafts are greedy."""
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
    """Block verification is refused with kernels=triton, which has no kernel for it."""
    rule: Any = config.acceptance
    if config.kernels != KernelsChoice.triton or rule.method != RejectionMethodChoice.block:
        return None
    return "acceptance.method=block has no kernel for kernels=triton; use kernels=torch or acceptance.method=standard"


def shape_of_drafts_fits_the_method(config: RunConfig) -> str | None:
    """Traversal verification needs a tree, and standard and block a chain; one_hot takes either."""
    rule: Any = config.acceptance
    is_chain, judges_trees = config.tree.name == TreeConfig.name, rule.method == RejectionMethodChoice.traversal
    if rule.method == RejectionMethodChoice.one_hot or is_chain != judges_trees:
        return None
    if is_chain:
        return (
            "acceptance.method=traversal judges trees, and equals acceptance.method=block on a chain; use "
            "acceptance.method=block or tree=static"
        )
    return (
        f"acceptance.method={rule.method} judges chains of drawn drafts, not tree={config.tree.name}; use "
        "acceptance.method=traversal with tree=static, acceptance.method=one_hot or tree=none"
    )


def drafts_of_a_tree_are_drawn_in_its_shape(config: RunConfig) -> str | None:
    """Traversal is for tree=static, whose paths it reads. If a tree's shape depends on its drafts, they have another
    distribution than the one that the rule would use."""
    rule: Any = config.acceptance
    if rule.method != RejectionMethodChoice.traversal or config.tree.name in (TreeConfig.name, StaticTreeConfig.name):
        return None
    return (
        f"acceptance.method=traversal needs the fixed paths of tree=static, not tree={config.tree.name}: it would be "
        "biased if drafts chose the shape; use tree=static, or acceptance.method=one_hot"
    )


def walk(chosen: Chosen, options: RejectionConfig, build: RuleBuild) -> TreeRule:
    """Make acceptance=rejection for trees: acceptance.method=one_hot or traversal."""
    from spec_lab.acceptance.traversal import TraversalAcceptance
    from spec_lab.acceptance.tree import OneHotTreeAcceptance
    from spec_lab.core.draft_paths import DraftPaths

    if options.method == RejectionMethodChoice.one_hot:
        return OneHotTreeAcceptance(_sampling(chosen), build.seeds, build.kernels)
    tree: Any = chosen.config.tree
    paths, device = DraftPaths(tree.paths), build.device
    return TraversalAcceptance(paths, _sampling(chosen), build.seeds, device, tree.replacement)


def build_rule(chosen: Chosen, options: RejectionConfig, build: RuleBuild) -> AcceptanceRule:
    """Make acceptance=rejection. Without drafts it is one_hot, since every method then just samples from the target."""
    from spec_lab.acceptance.rejection import METHODS, RejectionAcceptance

    method = options.method if chosen.drafter.drafts else RejectionMethodChoice.one_hot
    lossless, kernels = not options.allow_lossy, build.kernels
    return RejectionAcceptance(METHODS[method], _sampling(chosen), build.seeds, lossless=lossless, kernels=kernels)


def _sampling(chosen: Chosen) -> SamplingParams:
    from spec_lab.acceptance.distribution import SamplingParams

    sampling = chosen.config.sampling
    return SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p)


ROW = RuleOption(
    name="rejection",
    schema=RejectionConfig,
    build=build_rule,
    refusals=(
        rejection_reads_the_draft_distribution,
        lossy_draft_option,
        block_verification_has_no_kernel,
        shape_of_drafts_fits_the_method,
        drafts_of_a_tree_are_drawn_in_its_shape,
    ),
    walk=walk,
    takes_fewer_drafts=True,
    keeps_the_law=lambda options: not options.allow_lossy,
)
