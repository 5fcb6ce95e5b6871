"""Refuses what no drafter, or no drafter with a rule, can do. Functions like those of `compatibility.run`."""

from __future__ import annotations

from collections.abc import Callable

from spec_lab.assembly import registry
from spec_lab.assembly.drafters.trained import sampled_drafts_need_a_temperature
from spec_lab.assembly.run_offers import MAX_DRAFT_TOKENS
from spec_lab.assembly.run_tree import tree_sizes
from spec_lab.config import RunConfig


def drafting_needs_tokens(config: RunConfig) -> str | None:
    """A drafter that drafts a chain drafts between one token and the most there can be; a tree bounds its own depth."""
    drafter = config.drafter
    if not registry.of(config).drafter(config).drafts or tree_sizes(config) is not None:
        return None
    if 1 <= drafter.num_draft_tokens <= MAX_DRAFT_TOKENS:
        return None
    if drafter.num_draft_tokens == 0:
        return (
            f"drafter={drafter.name} with drafter.num_draft_tokens=0 drafts nothing; "
            "use drafter=none or drafter.num_draft_tokens=3"
        )
    return (
        f"drafter.num_draft_tokens={drafter.num_draft_tokens} is outside 1..{MAX_DRAFT_TOKENS}; "
        "use drafter.num_draft_tokens=3"
    )


def rule_is_greedy(config: RunConfig) -> str | None:
    """Some rules have no meaning at a temperature above 0; their rows say why."""
    why = registry.of(config).rule(config).greedy_only
    if why is None or config.sampling.temperature <= 0:
        return None
    return (
        f"acceptance={config.acceptance.name} {why}, which sampling.temperature={config.sampling.temperature} does not "
        "take; use sampling.temperature=0 or acceptance=rejection"
    )


def greedy_text_is_followed(config: RunConfig) -> str | None:
    """Some drafters need an output that is plain greedy decoding's; their rows say why."""
    options = registry.of(config)
    why = options.drafter(config).follows_greedy_text
    if why is None:
        return None
    if config.sampling.temperature > 0:
        return (
            f"drafter={config.drafter.name} {why}, which sampling.temperature={config.sampling.temperature} does not "
            "follow; use sampling.temperature=0"
        )
    if options.rule(config).keeps_greedy_text:
        return None
    return (
        f"drafter={config.drafter.name} {why}, which acceptance={config.acceptance.name} does not follow; "
        "use acceptance=strict"
    )


DRAFTER_CHECKS: tuple[Callable[[RunConfig], str | None], ...] = (
    drafting_needs_tokens,
    rule_is_greedy,
    greedy_text_is_followed,
    sampled_drafts_need_a_temperature,
)
