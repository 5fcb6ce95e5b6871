"""Makes once what several checks need: the results of the run's loop, and drafts for its rounds under teacher
forcing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spec_lab.core.results import RequestRecord
from spec_lab.core.types import FeatureSpec
from spec_lab.doctor.rounds import DraftRecorder, DraftsByRound, LoopRound, rounds_of, spread
from spec_lab.doctor.subject import Subject
from spec_lab.doctor.teacher_forced import Drafted, TeacherForcedDrafts
from spec_lab.wiring.drafting import load_drafter

# With fewer rounds a share of rounds is meaningless.
MIN_ROUNDS = 24


@dataclass(frozen=True, slots=True)
class LoopRun:
    """What the run's engine made of the requests, and what its drafter reads of the target."""

    records: list[RequestRecord]
    drafts: DraftsByRound
    features: FeatureSpec


@dataclass(frozen=True, slots=True)
class Evidence:
    """The loop against teacher forcing.

    Attributes:
        features: what the drafter reads of the target.
        forced: drafts the same rounds again, with any drafter.
        in_loop: what the loop drafted in these rounds.
        as_configured: what the drafter as it was configured drafts there under teacher forcing.
    """

    subject: Subject
    features: FeatureSpec
    forced: TeacherForcedDrafts
    in_loop: Drafted
    as_configured: Drafted

    @property
    def rounds(self) -> Sequence[LoopRound]:
        return self.forced.rounds


def run_loop(subject: Subject) -> LoopRun:
    """Run the requests through the run's own engine."""
    engine = subject.engine(subject.chosen, subject.make_drafter)
    recorder = DraftRecorder(engine)
    engine.graph = recorder
    records = engine.generate(subject.requests).requests
    return LoopRun(records, recorder.drafts, engine.parts.drafter.requirements.features)


def gather(subject: Subject, loop: LoopRun) -> Evidence | None:
    """Gather the evidence; None where not enough rounds of the loop can be judged."""
    rounds = spread(rounds_of(subject, loop.records, loop.drafts), subject.max_rounds)
    if len(rounds) < MIN_ROUNDS:
        return None
    forced = TeacherForcedDrafts(subject, rounds)
    in_loop = forced.judged(torch.tensor([loop_round.drafts for loop_round in rounds]))
    make_drafter = load_drafter(subject.of_spine, subject.reference_build)
    return Evidence(subject, loop.features, forced, in_loop, forced.draft(make_drafter))
