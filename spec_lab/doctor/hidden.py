"""Checks whether the target's hidden states reach the drafter, and whether they help."""

from __future__ import annotations

import torch

from spec_lab.core.types import FeatureSpec
from spec_lab.doctor.evidence import Evidence
from spec_lab.doctor.findings import Finding, Verdict, does_not_apply
from spec_lab.doctor.loop import MIN_AGREEMENT
from spec_lab.doctor.teacher_forced import Drafted

CHECK = "hidden path"
# If drafts depend on the hidden states, zeroing these changes nearly every first draft.
MIN_CHANGED = 0.05
# Without hidden states, a head that was trained on them loses far more agreement than this.
MIN_DROP = 0.05


def check_hidden(evidence: Evidence) -> Finding:
    """Compare drafts made with zeros in place of the target's hidden states with normal drafts."""
    if evidence.features == FeatureSpec():
        return does_not_apply(CHECK, "the drafter reads no hidden state of the target")
    zeroed = evidence.forced.draft(evidence.subject.of_spine.drafter.build, torch.zeros_like)
    as_it_is = evidence.as_configured
    changed = float((zeroed.tokens[:, 0] != as_it_is.tokens[:, 0]).double().mean())
    measured = (
        f"first draft agrees {as_it_is.agreement(1):.2f}, with the hidden zeroed {zeroed.agreement(1):.2f}; "
        f"{changed:.1%} of the first drafts change"
    )
    broken = _values(evidence)
    if broken is not None:
        return Finding(CHECK, Verdict.FAULT, measured, broken)
    if changed < MIN_CHANGED:
        cause = "the drafter does not use its hidden states"
        return Finding(CHECK, Verdict.FAULT, measured, cause)
    return Finding(CHECK, Verdict.SUSPICIOUS if _does_not_help(as_it_is, zeroed) else Verdict.OK, measured)


def _values(evidence: Evidence) -> str | None:
    """Return what is wrong with the hidden states themselves; None if nothing is."""
    values = [
        evidence.forced.features(text, evidence.features)
        for text in {loop_round.text for loop_round in evidence.rounds}
    ]
    rows = torch.cat([value for value in values if value is not None])
    if not bool(rows.isfinite().all()):
        return "the target's hidden states have NaN or infinity"
    num_zero = int((rows == 0).all(dim=-1).sum())
    if num_zero:
        return f"the target's hidden states are zero in {num_zero} of {len(rows)} rows"
    return None


def _does_not_help(as_it_is: Drafted, zeroed: Drafted) -> bool:
    """Return whether drafts without hidden states agree nearly as often. False if too few normal drafts agree."""
    drop = as_it_is.agreement(1) - zeroed.agreement(1)
    return as_it_is.agreement(1) >= MIN_AGREEMENT and drop < MIN_DROP
