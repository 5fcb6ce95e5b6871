"""Checks whether the hidden state that a draft step passes to the next one arrives there, and whether it helps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from spec_lab.build.engine import DrafterMaker
from spec_lab.build.lab import Lab
from spec_lab.core.prompts import PromptPack
from spec_lab.core.protocols import Drafter
from spec_lab.core.types import DraftStep, Request, VerifiedRound
from spec_lab.doctor.evidence import Evidence
from spec_lab.doctor.findings import Finding, Verdict, does_not_apply
from spec_lab.doctor.hidden import MIN_CHANGED, MIN_DROP
from spec_lab.doctor.loop import MIN_LATER_AGREEMENT
from spec_lab.doctor.teacher_forced import Drafted

CHECK = "recycled path"


class ZeroedRecycling:
    """Wraps a `Drafter`, whose steps then read zeros instead of the hidden state in `state.hidden`."""

    def __init__(self, drafter: Drafter[Any]) -> None:
        self.num_draft_tokens = drafter.num_draft_tokens
        self.requirements = replace(drafter.requirements, drafts_rest=False)
        self._drafter = drafter

    def admit(self, slot: int, request: Request) -> None:
        self._drafter.admit(slot, request)

    def ingest(self, pack: PromptPack) -> Any:
        return self._drafter.ingest(pack)

    def catch_up(self, verified: VerifiedRound) -> Any:
        return self._drafter.catch_up(verified)

    def step(self, state: Any, step: DraftStep) -> None:
        state.hidden = torch.zeros_like(state.hidden)
        self._drafter.step(state, step)

    def kept_logits(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return self._drafter.kept_logits(slot_ids)


def check_recycled(evidence: Evidence) -> Finding:
    """Compare drafts made with a zeroed recycled hidden state with normal drafts. Draft 1 reads no recycled state."""
    num_draft_tokens = evidence.subject.num_draft_tokens
    if num_draft_tokens < 2:
        return does_not_apply(CHECK, f"drafter.num_draft_tokens={num_draft_tokens} recycles nothing")
    option = evidence.subject.config.drafter
    if not option.hands_hidden_on:
        return does_not_apply(CHECK, f"drafter={option.name} does not say that its steps hand a hidden state on")
    as_it_is = evidence.as_configured
    zeroed = evidence.forced.draft(_zeroed(evidence))
    changed = (zeroed.tokens != as_it_is.tokens).double().mean(dim=0)[1:]
    shares = " ".join(f"{share:.1%}" for share in changed.tolist())
    measured = (
        f"draft 2 agrees {as_it_is.conditional(2):.2f} after a right draft 1, with the recycled hidden zeroed "
        f"{zeroed.conditional(2):.2f}; {shares} of the later drafts change"
    )
    if float(changed.min()) < MIN_CHANGED:
        cause = (
            f"draft {int(changed.argmin()) + 2} does not use the hidden state "
            "of the step before: that state is zero, or "
            f"its projection is"
        )
        return Finding(CHECK, Verdict.FAULT, measured, cause)
    return Finding(CHECK, Verdict.SUSPICIOUS if _does_not_help(as_it_is, zeroed) else Verdict.OK, measured)


def _zeroed(evidence: Evidence) -> DrafterMaker:
    def make(lab: Lab) -> Drafter[Any]:
        return ZeroedRecycling(evidence.subject.of_spine.drafter.build(lab))

    return make


def _does_not_help(as_it_is: Drafted, zeroed: Drafted) -> bool:
    """Return whether zeroing hardly lowers the agreement of draft 2. False if that agreement is low anyway."""
    drop = as_it_is.conditional(2) - zeroed.conditional(2)
    return as_it_is.conditional(2) >= MIN_LATER_AGREEMENT and drop < MIN_DROP
