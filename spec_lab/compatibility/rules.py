"""What cannot work together, for acceptance rules. Pure functions like those of `compatibility`; imports no torch."""

from __future__ import annotations

from collections.abc import Callable

from spec_lab.acceptance.rates import check_rates, expand_mean_length
from spec_lab.config import RejectionConfig, RelaxedThinkingConfig, RunConfig, SyntheticConfig
from spec_lab.errors import UserError, not_among

GREEDY_RULES = {
    "strict": "compares with the argmax",
    "relaxed_thinking": "measures from the argmax of the raw logits",
    "synthetic": "ends a round with the argmax",
}
RELAXED_FORMS = ("delta", "ratio")
RELAXED_PHASES = ("token", "round")
REJECTION_METHODS = ("standard", "one_hot", "block")
DRAFT_SAMPLING = ("greedy", "distribution")


def rule_is_greedy(config: RunConfig) -> str | None:
    """strict, relaxed_thinking, synthetic have no meaning at a temperature above 0."""
    why = GREEDY_RULES.get(config.acceptance.name)
    if why is None or config.sampling.temperature <= 0:
        return None
    return (
        f"acceptance={config.acceptance.name} {why}, which sampling.temperature={config.sampling.temperature} does not "
        "take; use sampling.temperature=0 or acceptance=rejection"
    )


def relaxed_knobs(config: RunConfig) -> str | None:
    rule = config.acceptance
    if not isinstance(rule, RelaxedThinkingConfig):
        return None
    if rule.topk < 1:
        return f"acceptance.topk={rule.topk} leaves no candidate; use acceptance.topk=1 (strict) or more"
    if not 0 <= rule.delta <= 1:
        return f"acceptance.delta={rule.delta} is no difference of probabilities; use acceptance.delta=0.6"
    if not 0 < rule.ratio <= 1:
        return f"acceptance.ratio={rule.ratio} is no ratio to the largest probability; use acceptance.ratio=0.5"
    return not_among("acceptance.form", rule.form, RELAXED_FORMS) or not_among(
        "acceptance.phase", rule.phase, RELAXED_PHASES
    )


def draft_sampling_needs_temperature(config: RunConfig) -> str | None:
    """Greedy rules with sampled drafts end here too: they run at temperature 0 only."""
    sampling = getattr(config.drafter, "draft_sampling", "greedy")
    unknown = not_among("drafter.draft_sampling", sampling, DRAFT_SAMPLING)
    if unknown or sampling == "greedy" or config.sampling.temperature > 0:
        return unknown
    return (
        f"drafter.draft_sampling={sampling} draws at sampling.temperature, which is 0; use "
        "drafter.draft_sampling=greedy or sampling.temperature=1 acceptance=rejection"
    )


def rejection_reads_the_draft_distribution(config: RunConfig) -> str | None:
    """standard and block divide by the probability a draft was sampled with; a greedy draft's is 1, not the head's.

    With the head's probabilities under greedy drafts the output is biased: only acceptance.allow_lossy lets that run.
    block with one-hot q would be lossless, and accept what one_hot accepts in expectation: refused as pointless.
    one_hot holds for every draft, sampled ones included (tests/test_rejection.py enumerates it): it passes.
    """
    rule = config.acceptance
    if not isinstance(rule, RejectionConfig) or config.drafter.name == "none":
        return None
    if rule.method not in REJECTION_METHODS:
        return not_among("acceptance.method", rule.method, REJECTION_METHODS)
    if rule.method == "one_hot":
        return None
    if not hasattr(config.drafter, "draft_sampling"):
        return (
            f"acceptance.method={rule.method} reads draft probabilities, and drafter={config.drafter.name} has none; "
            "use acceptance.method=one_hot"
        )
    is_greedy = config.drafter.draft_sampling == "greedy"
    if config.sampling.temperature > 0 and is_greedy and not rule.allow_lossy:
        return (
            f"acceptance.method={rule.method} with drafter.draft_sampling=greedy divides by probabilities the drafts "
            "were not drawn with; use drafter.draft_sampling=distribution, acceptance.method=one_hot, or "
            "acceptance.allow_lossy=true for a biased output"
        )
    if config.sampling.temperature <= 0:
        return (
            f"acceptance.method={rule.method} needs sampled drafts, and sampling.temperature=0 has none; "
            "use acceptance.method=one_hot or acceptance=strict"
        )
    return None


def lossy_draft_option(config: RunConfig) -> str | None:
    rule = config.acceptance
    if not isinstance(rule, RejectionConfig) or not rule.allow_lossy:
        return None
    if rule.method != "one_hot" and getattr(config.drafter, "draft_sampling", None) == "greedy":
        return None
    return (
        "acceptance.allow_lossy=true has nothing to allow: only greedy drafts under acceptance.method=standard or "
        "block are lossy; use acceptance.allow_lossy=false"
    )


def synthetic_rates(config: RunConfig) -> str | None:
    rule = config.acceptance
    if not isinstance(rule, SyntheticConfig):
        return None
    if (rule.rates is None) == (rule.mean_length is None):
        return (
            f"acceptance.mean_length={rule.mean_length} and acceptance.rates={rule.rates}: one of them sets the rates; "
            "set the other to null"
        )
    try:
        if rule.rates is None:
            assert rule.mean_length is not None
            expand_mean_length(rule.mean_length, config.drafter.num_draft_tokens)
        else:
            check_rates(rule.rates, config.drafter.num_draft_tokens)
    except UserError as error:
        return str(error)
    return None


RULE_CHECKS: tuple[Callable[[RunConfig], str | None], ...] = (
    rule_is_greedy,
    relaxed_knobs,
    draft_sampling_needs_temperature,
    rejection_reads_the_draft_distribution,
    lossy_draft_option,
    synthetic_rates,
)
