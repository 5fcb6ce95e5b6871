"""Computes the data that several checks share: the results of the run's loop, and drafts for its rounds under teacher
forcing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spec_lab.core.results import RequestRecord
from spec_lab.core.types import FeatureSpec
from spec_lab.doctor.rounds import DraftRecorder, DraftsByRound, LoopRound, rounds_of, spread
from spec_lab.doctor.subject import Subject
from spec_lab.doctor.teacher_forced import Drafted, TeacherForcedDrafts

# With fewer rounds a share of rounds is meaningless.
MIN_ROUNDS = 24


@dataclass(frozen=True, slots=True)
class LoopRun:
    """The results of the requests in the run's engine, and the features of the target that its drafter reads."""

    records: list[RequestRecord]
    drafts: DraftsByRound
    features: FeatureSpec


@dataclass(frozen=True, slots=True)
class Evidence:
    """The drafts of the loop and those under teacher forcing, for the same rounds.

    Attributes:
        features: the features of the target that the drafter reads.
        forced: drafts the same rounds again under teacher forcing, with any drafter.
        in_loop: the drafts of the loop.
        as_configured: the drafts of the configured drafter under teacher forcing.
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
    engine = subject.engine(subject.config)
    graph: Any = (recorder := DraftRecorder(engine))
    engine.graph = graph
    records = engine.generate(subject.requests).requests
    return LoopRun(records, recorder.drafts, engine.parts.drafter.requirements.features)


def gather(subject: Subject, loop: LoopRun) -> Evidence | None:
    """Gather the evidence; None if too few rounds of the loop can be judged."""
    rounds = spread(rounds_of(subject, loop.records, loop.drafts), subject.max_rounds)
    if len(rounds) < MIN_ROUNDS:
        return None
    forced = TeacherForcedDrafts(subject, rounds)
    in_loop = forced.judged(torch.tensor([loop_round.drafts for loop_round in rounds]))
    return Evidence(subject, loop.features, forced, in_loop, as_configured=forced.draft(subject.of_spine.drafter.build))
