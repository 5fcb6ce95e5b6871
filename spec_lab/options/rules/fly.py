"""acceptance=fly: its keys, refusals, and the functions that make it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_lab.menu.config import AcceptanceConfig, knob
from spec_lab.menu.option import RuleOption
from spec_lab.options.rules.between import make_lossy

if TYPE_CHECKING:
    from typing import Any

    from spec_lab.acceptance.deterministic import DraftJudge
    from spec_lab.core.protocols import AcceptanceRule
    from spec_lab.menu.chosen import Chosen
    from spec_lab.menu.config import RunConfig
    from spec_lab.wiring.rules import RuleBuild, RuleContext


@dataclass
class FlyConfig(AcceptanceConfig):
    """acceptance=fly (FLy, vLLM 0.33, lossy): a miss passes if the target is unsure there and agrees with the drafts
    after it."""

    name: str = "fly"
    window: int = knob(2, "number of drafts after a miss that must pass by themselves", least=1)
    entropy: float = knob(0.3, "least entropy of the likeliest tokens, in nats, for a miss to pass", least=0)
    topk: int = knob(3, "number of likeliest tokens for the entropy", least=2)


def a_window_fits(config: RunConfig) -> str | None:
    """The window must be shorter than the drafts; otherwise no mismatch could ever be accepted."""
    rule: Any = config.acceptance
    num_draft_tokens = config.drafter.num_draft_tokens
    if num_draft_tokens == 0 or rule.window < num_draft_tokens:
        return None
    remedy = f"use acceptance.window={num_draft_tokens - 1}" if num_draft_tokens > 1 else "use acceptance=strict"
    return (
        f"acceptance.window={rule.window} needs that many drafts after a forgiven one, but "
        f"drafter.num_draft_tokens={num_draft_tokens}; {remedy} or drafter.num_draft_tokens={rule.window + 1}"
    )


def build_rule(chosen: Chosen, options: FlyConfig, build: RuleBuild) -> AcceptanceRule:
    """Make acceptance=fly."""
    from spec_lab.acceptance.lossy import Window
    from spec_lab.acceptance.token_laws import OverlapLaw, exact

    return make_lossy(chosen, build, OverlapLaw(exact), Window(options.window, options.entropy, options.topk))


def judge_again(options: FlyConfig, context: RuleContext) -> DraftJudge:
    """Make a rule that judges a recorded run as acceptance=fly does at temperature 0."""
    from spec_lab.acceptance.forgiving import ForgivingJudge
    from spec_lab.acceptance.lossy import Window

    return ForgivingJudge(Window(options.window, options.entropy, options.topk))


ROW = RuleOption(
    name="fly",
    schema=FlyConfig,
    build=build_rule,
    judge_again=judge_again,
    refusals=(a_window_fits,),
    takes_fewer_drafts=True,
)
