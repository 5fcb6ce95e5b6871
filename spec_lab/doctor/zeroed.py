"""Checks whether hidden states reach the drafter, and whether they help: the target's, and those that a draft step
passes to the next one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from spec_lab.build.lab import Lab
from spec_lab.core.protocols import Drafter
from spec_lab.core.types import DraftStep, FeatureSpec
from spec_lab.doctor.evidence import Evidence
from spec_lab.doctor.findings import Finding, Verdict, does_not_apply
from spec_lab.doctor.loop import MIN_AGREEMENT, MIN_LATER_AGREEMENT
from spec_lab.doctor.teacher_forced import Drafted

# If drafts depend on the hidden states, zeroing these changes nearly every draft.
MIN_CHANGED = 0.05
# Without hidden states, a head that was trained on them loses far more agreement than this.
MIN_DROP = 0.05


class ZeroedRecycling:
    """Wraps a `Drafter`, whose steps then read zeros instead of the hidden state in `state.hidden`."""

    def __init__(self, drafter: Drafter[Any]) -> None:
        self.requirements = replace(drafter.requirements, drafts_rest=False)
        self._drafter = drafter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def step(self, state: Any, step: DraftStep) -> None:
        state.hidden = torch.zeros_like(state.hidden)
        self._drafter.step(state, step)


def check_hidden(evidence: Evidence) -> Finding:
    """Compare drafts made with zeros in place of the target's hidden states with normal drafts."""
    check = "hidden path"
    if evidence.features == FeatureSpec():
        return does_not_apply(check, "the drafter reads no hidden state of the target")
    zeroed = evidence.forced.draft(evidence.subject.of_spine.drafter.build, torch.zeros_like)
    as_it_is = evidence.as_configured
    changed = float((zeroed.tokens[:, 0] != as_it_is.tokens[:, 0]).double().mean())
    measured = (
        f"first draft agrees {as_it_is.agreement(1):.2f}, with the hidden zeroed {zeroed.agreement(1):.2f}; "
        f"{changed:.1%} of the first drafts change"
    )
    unused = "the drafter does not use its hidden states" if changed < MIN_CHANGED else None
    if (cause := _wrong_values(evidence) or unused) is not None:
        return Finding(check, Verdict.FAULT, measured, cause)
    return Finding(check, _verdict(as_it_is, zeroed, 1, MIN_AGREEMENT), measured)


def check_recycled(evidence: Evidence) -> Finding:
    """Compare drafts made with a zeroed recycled hidden state with normal drafts. Draft 1 reads no recycled state."""
    check, option = "recycled path", evidence.subject.of_spine.drafter
    if option.num_draft_tokens < 2:
        return does_not_apply(check, f"drafter.num_draft_tokens={option.num_draft_tokens} recycles nothing")
    if not option.hands_hidden_on:
        return does_not_apply(check, f"drafter={option.name} does not say that its steps hand a hidden state on")

    def make(lab: Lab) -> Drafter[Any]:
        wrapped: Any = ZeroedRecycling(option.build(lab))
        drafter: Drafter[Any] = wrapped
        return drafter

    as_it_is, zeroed = evidence.as_configured, evidence.forced.draft(make)
    changed = (zeroed.tokens != as_it_is.tokens).double().mean(dim=0)[1:]
    measured = (
        f"draft 2 agrees {as_it_is.conditional(2):.2f} after a right draft 1, with the recycled hidden zeroed "
        f"{zeroed.conditional(2):.2f}; {' '.join(f'{share:.1%}' for share in changed.tolist())} of the later drafts "
        "change"
    )
    if float(changed.min()) < MIN_CHANGED:
        cause = (
            f"draft {int(changed.argmin()) + 2} does not use the hidden state of the step before: that state is zero, "
            "or its projection is"
        )
        return Finding(check, Verdict.FAULT, measured, cause)
    return Finding(check, _verdict(as_it_is, zeroed, 2, MIN_LATER_AGREEMENT), measured)


def _wrong_values(evidence: Evidence) -> str | None:
    """Return what is wrong with the target's hidden states themselves; None if nothing is."""
    texts = {loop_round.text for loop_round in evidence.rounds}
    values = [evidence.forced.features(text, evidence.features) for text in texts]
    rows = torch.cat([value for value in values if value is not None])
    if not bool(rows.isfinite().all()):
        return "the target's hidden states have NaN or infinity"
    num_zero = int((rows == 0).all(dim=-1).sum())
    return f"the target's hidden states are zero in {num_zero} of {len(rows)} rows" if num_zero else None


def _verdict(as_it_is: Drafted, zeroed: Drafted, position: int, least: float) -> Verdict:
    """Return whether a draft is hardly worse without the hidden states; too low an agreement is not judged here."""
    rate = as_it_is.conditional(position)
    return Verdict.SUSPICIOUS if rate >= least and rate - zeroed.conditional(position) < MIN_DROP else Verdict.OK
