"""Checks drafters, and drafters with rules. Each function is a check, as in `menu.refusals.run`."""

from __future__ import annotations

from collections.abc import Callable

from spec_lab.menu.choices import DraftSampling
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import RunConfig
from spec_lab.menu.offers import MAX_DRAFT_TOKENS


def lossless_rule(config: RunConfig) -> str:
    """Return the overrides for a lossless rule at the run's temperature, which refusals of other rules suggest."""
    is_greedy = config.sampling.temperature <= 0
    return "acceptance=strict" if is_greedy else "acceptance=rejection acceptance.method=one_hot"


def drafting_needs_tokens(chosen: Chosen) -> str | None:
    """K is at least 1 and at most MAX_DRAFT_TOKENS, if the drafter drafts chains. Trees have their own bounds."""
    drafter = chosen.config.drafter
    if not chosen.drafter.drafts or chosen.sizes is not None:
        return None
    if 1 <= drafter.num_draft_tokens <= MAX_DRAFT_TOKENS:
        return None
    if drafter.num_draft_tokens == 0:
        return (
            f"drafter={drafter.name} with drafter.num_draft_tokens=0 drafts nothing; "
            "use drafter=none or drafter.num_draft_tokens=3"
        )
    return (
        f"drafter.num_draft_tokens={drafter.num_draft_tokens} is outside 1..{MAX_DRAFT_TOKENS}; use "
        "drafter.num_draft_tokens=3"
    )


def rule_is_greedy(chosen: Chosen) -> str | None:
    """A rule that is only defined for greedy decoding needs temperature 0; its `greedy_only` says why."""
    config = chosen.config
    why = chosen.rule.greedy_only
    if why is None or config.sampling.temperature <= 0:
        return None
    return (
        f"acceptance={config.acceptance.name} {why}, but sampling.temperature={config.sampling.temperature} samples; "
        f"use sampling.temperature=0 or {lossless_rule(config)}"
    )


def greedy_text_is_followed(chosen: Chosen) -> str | None:
    """A drafter with `follows_greedy_text` needs a run that emits plain greedy decoding's output; this key says why."""
    config = chosen.config
    why = chosen.drafter.follows_greedy_text
    if why is None:
        return None
    if config.sampling.temperature > 0:
        return (
            f"drafter={config.drafter.name} {why}, but sampling.temperature={config.sampling.temperature} samples; "
            "use sampling.temperature=0"
        )
    if chosen.rule.keeps_greedy_text:
        return None
    return (
        f"drafter={config.drafter.name} {why}, but acceptance={config.acceptance.name} may emit another text; "
        "use acceptance=strict"
    )


def sampled_drafts_need_a_temperature(chosen: Chosen) -> str | None:
    """Sampled drafts need a temperature above 0, at which they are drawn. So no greedy rule can have them."""
    sampling = getattr(chosen.config.drafter, "draft_sampling", DraftSampling.greedy)
    if sampling == DraftSampling.greedy or chosen.config.sampling.temperature > 0:
        return None
    rule = "acceptance=rejection" if chosen.sizes is None else "acceptance=rejection acceptance.method=traversal"
    return (
        f"drafter.draft_sampling={sampling} draws at sampling.temperature, which is 0; use "
        f"drafter.draft_sampling=greedy or sampling.temperature=1 {rule}"
    )


DRAFTER_CHECKS: tuple[Callable[[Chosen], str | None], ...] = (
    drafting_needs_tokens,
    rule_is_greedy,
    greedy_text_is_followed,
    sampled_drafts_need_a_temperature,
)
