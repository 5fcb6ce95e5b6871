"""acceptance=relaxed_thinking: its keys, refusals, and the functions that make it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spec_lab.core.errors import UserError
from spec_lab.menu.choices import Choice, RelaxedPhase
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import AcceptanceConfig, RunConfig, knob
from spec_lab.menu.option import RuleOption

if TYPE_CHECKING:
    from spec_lab.acceptance.deterministic import DeterministicRule
    from spec_lab.acceptance.phase import RelaxationPhase
    from spec_lab.acceptance.relaxed import RelaxedForm
    from spec_lab.core.tree_protocols import TreeRule
    from spec_lab.wiring.rules import RuleBuild, RuleContext


class RelaxedFormChoice(Choice):
    """The ways to say how near to the likeliest token a draft must be."""

    delta = "delta", "p >= p_top1 - delta"
    ratio = "ratio", "p >= p_top1 * ratio"


@dataclass
class RelaxedThinkingConfig(AcceptanceConfig):
    """acceptance=relaxed_thinking: near misses count while the model thinks. Lossy."""

    name: str = "relaxed_thinking"
    form: RelaxedFormChoice = knob(RelaxedFormChoice.delta, "how near a draft must be to the likeliest token")
    topk: int = knob(10, "a draft must be among this many likeliest tokens; 1 is strict")
    delta: float = knob(0.6, "largest difference of probabilities; acceptance.form=delta only")
    ratio: float = knob(0.5, "least ratio of probabilities; acceptance.form=ratio only")
    phase: RelaxedPhase = knob(RelaxedPhase.token, "when it relaxes")


def relaxed_knobs(config: RunConfig) -> str | None:
    """topk, delta and ratio are within their bounds."""
    rule: Any = config.acceptance
    if rule.topk < 1:
        return f"acceptance.topk={rule.topk} leaves no candidate; use acceptance.topk=1 (strict) or more"
    if not 0 <= rule.delta <= 1:
        return f"acceptance.delta={rule.delta} is not a difference of probabilities; use acceptance.delta=0.6"
    if not 0 < rule.ratio <= 1:
        return f"acceptance.ratio={rule.ratio} is not a ratio to the largest probability; use acceptance.ratio=0.5"
    return None


def the_other_form_is_left_alone(config: RunConfig) -> str | None:
    """The number of the other form is not set, since it would not be read."""
    rule: Any = config.acceptance
    unread = "ratio" if rule.form == RelaxedFormChoice.delta else "delta"
    value, default = getattr(rule, unread), getattr(RelaxedThinkingConfig, unread)
    if value == default:
        return None
    return (
        f"acceptance.{unread}={value} is not read by acceptance.form={rule.form}; leave it out or use "
        f"acceptance.form={unread}"
    )


def judge(options: RelaxedThinkingConfig, context: RuleContext) -> DeterministicRule:
    """Make the rule of acceptance=relaxed_thinking; UserError if the tokenizer has no thinking markers."""
    from spec_lab.acceptance.relaxed import RelaxedThinkingAcceptance

    form, phase = _relaxation(options, context)
    return RelaxedThinkingAcceptance(form, options.topk, phase, context.kernels)


def walk(chosen: Chosen, options: RelaxedThinkingConfig, build: RuleBuild) -> TreeRule:
    """Make acceptance=relaxed_thinking for trees."""
    from spec_lab.acceptance.relaxed_tree import RelaxedThinkingTreeAcceptance

    form, phase = _relaxation(options, build)
    return RelaxedThinkingTreeAcceptance(form, options.topk, phase)


def _relaxation(options: RelaxedThinkingConfig, context: RuleContext) -> tuple[RelaxedForm, RelaxationPhase]:
    """Make the required closeness of a draft, and the phase of the text in which it applies."""
    from spec_lab.acceptance.phase import RoundPhase, TokenPhase
    from spec_lab.acceptance.relaxed import DeltaForm, RatioForm

    markers = context.markers
    if markers is None:
        raise UserError(
            "acceptance=relaxed_thinking: this target has no known thinking markers; set target.thinking_begin and "
            "target.thinking_end"
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


ROW = RuleOption(
    name="relaxed_thinking",
    schema=RelaxedThinkingConfig,
    judge=judge,
    greedy_only="measures from the argmax of the raw logits",
    refusals=(relaxed_knobs, the_other_form_is_left_alone),
    walk=walk,
    takes_fewer_drafts=True,
)
