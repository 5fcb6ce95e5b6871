"""acceptance=relaxed_thinking."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_lab.config.choices import Choice, RelaxedPhase
from spec_lab.config.groups import AcceptanceConfig
from spec_lab.config.option import knob, option
from spec_lab.core.errors import UserError

if TYPE_CHECKING:
    from spec_lab.acceptance.phase import RelaxationPhase
    from spec_lab.acceptance.relaxed import RelaxedForm, RelaxedThinkingAcceptance
    from spec_lab.build.lab import Lab, RuleFacts
    from spec_lab.core.protocols import AcceptanceRule


class RelaxedFormChoice(Choice):
    """The ways to say how near to the likeliest token a draft must be."""

    delta = "delta", "p >= p_top1 - delta"
    ratio = "ratio", "p >= p_top1 * ratio"


@option("acceptance", "relaxed_thinking")
class RelaxedThinking(AcceptanceConfig):
    """Near misses count while the model thinks (TensorRT-LLM). Lossy."""

    greedy_only = "measures from the argmax of the raw logits"
    takes_fewer_drafts = True
    judges_trees = True

    form: RelaxedFormChoice = knob(RelaxedFormChoice.delta, "how near a draft must be to the likeliest token")
    topk: int = knob(10, "a draft must be among this many likeliest tokens; 1 is strict", least=1)
    delta: float = knob(0.6, "largest difference of probabilities; acceptance.form=delta only", least=0, most=1)
    ratio: float = knob(0.5, "least ratio of probabilities; acceptance.form=ratio only", above=0, most=1)
    phase: RelaxedPhase = knob(RelaxedPhase.token, "when it relaxes")

    def build(self, lab: Lab) -> AcceptanceRule:
        from spec_lab.acceptance.relaxed_tree import RelaxedThinkingTreeAcceptance

        if lab.run.sizes is None:
            return self.judge(lab.rule_facts)
        form, phase = self._relaxation(lab.rule_facts)
        return RelaxedThinkingTreeAcceptance(form, self.topk, phase)

    def judge(self, facts: RuleFacts) -> RelaxedThinkingAcceptance:
        from spec_lab.acceptance.relaxed import RelaxedThinkingAcceptance

        form, phase = self._relaxation(facts)
        return RelaxedThinkingAcceptance(form, self.topk, phase, facts.kernels)

    def _relaxation(self, facts: RuleFacts) -> tuple[RelaxedForm, RelaxationPhase]:
        """Make the required closeness of a draft, and the phase of the text in which it applies."""
        from spec_lab.acceptance.phase import RoundPhase, TokenPhase
        from spec_lab.acceptance.relaxed import DeltaForm, RatioForm

        markers = facts.markers
        if markers is None:
            raise UserError(
                "acceptance=relaxed_thinking: this target has no known thinking markers; set target.thinking_begin and "
                "target.thinking_end"
            )
        form: RelaxedForm = DeltaForm(self.delta) if self.form == RelaxedFormChoice.delta else RatioForm(self.ratio)
        if self.phase == RelaxedPhase.token:
            return form, TokenPhase(facts.num_slots, markers, facts.eos_token_ids, facts.device)
        return form, RoundPhase(facts.num_slots, markers, facts.prefill_chunk, facts.device)
