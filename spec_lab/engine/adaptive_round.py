"""A decode round in which requests may offer fewer drafts than there is room for, and whose K follows from the batch.

Shapes are those of its K: a draft that is not offered is verified like any other, and never accepted. Where nothing is
captured, rows that nobody offers are left out, and drafting ends with the last request that goes on.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from spec_lab.core.layer_protocols import MetadataMover
from spec_lab.core.prompts import PromptEnds
from spec_lab.core.types import AcceptanceInputs, RoundBatch, VerifiedRound
from spec_lab.engine.capture import GraphRecorder
from spec_lab.engine.draft_loop import DraftLoop, StepScope, make_draft_loop
from spec_lab.engine.experts_read import ReadingStage
from spec_lab.engine.k_schedule import KSchedule
from spec_lab.engine.offers import DraftOffers
from spec_lab.engine.round import DecodeRound, Parts, VerifyOutput


def adaptive_round(
    offers: DraftOffers, schedule: KSchedule | None, recorder: GraphRecorder | None, parts: Any
) -> DecodeRound:
    """Make the round of `parts`; with a schedule it is the one of the largest K, and knows the others.

    `recorder` captures the stages: the host then reads nothing, and every round has all its rows. None where they are
    launched from Python.
    """
    fixed_shapes = recorder is not None
    loop = make_draft_loop(parts, offers, recorder)
    if schedule is None:
        return AdaptiveRound(parts, offers, parts.drafter.num_draft_tokens, fixed_shapes, loop)
    assert schedule.choices[0] == parts.drafter.num_draft_tokens, "the largest K is what slots have room for"
    narrower = {k: AdaptiveRound(parts, offers, k, fixed_shapes, loop) for k in schedule.choices[1:]}
    return ScheduledRound(parts, offers, fixed_shapes, loop, schedule, narrower)


class AdaptiveRound(DecodeRound):
    """The stages of a round of `num_draft_tokens` drafts at most, over slots that may have room for more."""

    def __init__(
        self, parts: Parts, offers: DraftOffers, num_draft_tokens: int, fixed_shapes: bool, loop: DraftLoop
    ) -> None:
        """`fixed_shapes`: the host reads nothing, and every round has all its rows; `loop` runs the draft steps."""
        super().__init__(parts)
        self.num_draft_tokens = num_draft_tokens
        has_modules = parts.drafter.requirements.distinct_steps
        self.max_drafted = parts.drafter.num_draft_tokens if has_modules else num_draft_tokens
        self.num_drafted = self.max_drafted
        self._offers = offers
        self._fixed_shapes = fixed_shapes
        self._loop = loop

    def load(self, slot_ids: torch.Tensor, max_kv_len: int) -> RoundBatch:
        """Read the rows of [batch] slots, as many drafts of each as may be offered."""
        batch = super().load(slot_ids, max_kv_len)
        offered = self._offers.of(slot_ids, batch.active, self.num_draft_tokens)
        width = self.num_draft_tokens if self._fixed_shapes else int(offered.max())
        return replace(batch, input_ids=batch.input_ids[:, : width + 1], num_drafts=offered)

    def judged(self, output: VerifyOutput) -> AcceptanceInputs:
        inputs = super().judged(output)
        kept, width = inputs.draft_logits, inputs.draft_tokens.shape[1]
        kept = None if kept is None else kept[:, :width]
        return replace(inputs, draft_logits=kept, num_drafts=output.batch.num_drafts)

    def accept(self, output: VerifyOutput) -> VerifiedRound:
        """Let the rule judge the drafts that are offered, and note how many they were."""
        verified = super().accept(output)
        verified.verification.num_offered = output.batch.num_drafts
        return verified

    def catch_up(self, verified: VerifiedRound) -> Any:
        """Run the drafter's first step, and say how many drafts it begins."""
        state = super().catch_up(verified)
        self._offers.expect(verified.batch.slot_ids, self.max_drafted)
        return state

    def recur(self, state: Any) -> torch.Tensor:
        """Run the other draft steps, and return the drafts of the round, [batch, K] at most."""
        with self.parts.timer.span("recur"):
            counted = partial(self.parts.experts_read.stage, ReadingStage.RECUR)
            return self._collect(self.parts.mover, state, counted)

    def commit(self, verified: VerifiedRound, drafts: torch.Tensor) -> None:
        batch, verification = verified.batch, verified.verification
        with self.parts.timer.span("commit"):
            if self._loop.decides_on_device:
                verification.num_drafted = self._offers.num_drafted.index_select(0, batch.slot_ids)
            self.parts.slots.commit(batch, verification, self._with_room(drafts))

    def start(self, ends: PromptEnds, state: Any) -> None:
        """Draft from the state that a prompt pass ended in, and leave the first round's inputs in the slots."""
        self._offers.expect(ends.slot_ids, self.max_drafted)
        drafts = self._collect(self.parts.backend, state, nullcontext)
        self.parts.slots.start(ends, self._with_room(drafts))

    def _collect(self, mover: MetadataMover, state: Any, scope: StepScope) -> torch.Tensor:
        """Take the drafts from `state`."""
        drafts = self._loop.run(self.parts, mover, state, self.max_drafted, scope)
        self.num_drafted = drafts.shape[1]
        return drafts

    def _with_room(self, drafts: torch.Tensor) -> torch.Tensor:
        """Fill [batch, drafts] up to the width of the slots."""
        missing = self.parts.drafter.num_draft_tokens - drafts.shape[1]
        return F.pad(drafts, (0, missing)) if missing else drafts


class ScheduledRound(AdaptiveRound):
    """The round of the largest K, which knows those of the others."""

    def __init__(
        self,
        parts: Parts,
        offers: DraftOffers,
        fixed_shapes: bool,
        loop: DraftLoop,
        schedule: KSchedule,
        narrower: dict[int, AdaptiveRound],
    ) -> None:
        """`narrower`: a round for each smaller K of `schedule`, over the same parts."""
        super().__init__(parts, offers, parts.drafter.num_draft_tokens, fixed_shapes, loop)
        self._schedule = schedule
        self._narrower = narrower

    def of_batch(self, num_requests: int) -> DecodeRound:
        return self._narrower.get(self._schedule.k_of(num_requests), self)
