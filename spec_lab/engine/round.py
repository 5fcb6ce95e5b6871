"""A decode round verifies, accepts, catches up, recurs and commits."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as List
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from spec_lab.core.layer_protocols import MetadataMover
from spec_lab.core.prompts import PromptEnds
from spec_lab.core.selection import AllRows
from spec_lab.core.types import FeatureSpec, RoundBatch, Sequence, Verification, VerifiedRound
from spec_lab.engine.drafts import Drafts
from spec_lab.engine.experts_read import ReadingStage
from spec_lab.engine.host_drafts import HostDrafts
from spec_lab.engine.k_schedule import KSchedule
from spec_lab.engine.offers import Offers
from spec_lab.engine.parts import Parts, VerifyOutput
from spec_lab.engine.request_k import OFF, RequestLimits
from spec_lab.engine.stopping_loop import StepScope


class DecodeRound:
    """The five stages of a round, on device tensors alone, so that a graph mode may capture any stretch of them.

    `drafts` says what shape the drafts have, `offers` how many of them count: two fields, which compose.

    Attributes:
        num_drafted: drafts a request that the loop made in the round that was run last, as far as the host knows.
        num_verified: rows a request that verify ran in it.
        catches_up: the drafter is asked at all.
    """

    catches_up = True

    def __init__(self, parts: Parts, drafts: Drafts, offers: Offers) -> None:
        self.parts = parts
        self.drafts = drafts
        self.offers = offers
        self.num_drafted = offers.max_drafted
        self.num_verified = offers.num_draft_tokens + 1 if drafts.tree_rows is None else drafts.tree_rows

    @property
    def num_draft_tokens(self) -> int:
        """K, the most drafts a request that are verified."""
        return self.offers.num_draft_tokens

    @property
    def features(self) -> FeatureSpec:
        """Return what the target hands on to the drafter."""
        return self.parts.drafter.requirements.features

    def run(self, batch: RoundBatch) -> Verification:
        """Run one round over `batch`, and leave the next round's inputs in the slots."""
        verified = self.accept(self.verify(batch))
        drafts = self.recur(self.catch_up(verified))
        self.commit(verified, drafts)
        return verified.verification

    def waiting_drafts(self, slots: list[int]) -> list[list[int]]:
        """Tell the host the K drafts that wait in each of `slots` to be verified, for whoever examines them."""
        return self.drafts.waiting(self.parts.slots, slots)

    def load(self, slot_ids: torch.Tensor, max_kv_len: int) -> RoundBatch:
        """Read the rows of [batch] slots from the slot state."""
        return self.offers.mark(self.drafts.mark(self.parts.slots.batch(slot_ids, max_kv_len)))

    def verify(self, batch: RoundBatch) -> VerifyOutput:
        """Run the target over N rows a request."""
        parts = self.parts
        batch_size, num_rows = batch.input_ids.shape
        self.num_verified = num_rows
        parts.experts_read.begin_round(batch.active)
        with parts.timer.span("verify"), parts.experts_read.stage(ReadingStage.VERIFY):
            attention = self.drafts.attention(batch)
            token_ids = batch.input_ids.reshape(-1)
            output = parts.target.forward(token_ids, parts.cache, attention, AllRows(), self.features)
            logits = parts.target.logits(output.hidden).view(batch_size, num_rows, -1)
        return VerifyOutput(batch, logits, output.features)

    def accept(self, output: VerifyOutput) -> VerifiedRound:
        """Let the rule judge the drafts."""
        with self.parts.timer.span("accept"):
            kept = self.parts.drafter.kept_logits(output.batch.slot_ids)
            verified = self.drafts.judge(output, kept)
            verified.verification.num_offered = output.batch.num_drafts
            verified.verification.num_offered_rows = output.batch.num_draft_rows
            verified.verification.confidences = output.batch.confidences
            return verified

    def catch_up(self, verified: VerifiedRound) -> Any:
        """Run the drafter's catch-up step (its first step, if it has no cache of its own): the state with draft 1."""
        with self.parts.timer.span("catchup"), self.parts.experts_read.stage(ReadingStage.CATCHUP):
            state = self.parts.drafter.catch_up(verified)
        self.offers.expect(verified.batch.slot_ids)
        return state

    def recur(self, state: Any) -> Any:
        """Run the other draft steps, and return all drafts of the round: [batch, drafts] of a chain, or a tree."""
        with self.parts.timer.span("recur"):
            return self._collect(self.parts.mover, state, partial(self.parts.experts_read.stage, ReadingStage.RECUR))

    def commit(self, verified: VerifiedRound, drafts: Any) -> None:
        """Leave the next round's inputs in the slots; the host has read nothing yet."""
        with self.parts.timer.span("commit"):
            verified.verification.num_drafted = self.offers.made(verified.batch.slot_ids)
            self.drafts.leave(self.parts.slots, verified, drafts)

    def start(self, ends: PromptEnds, state: Any) -> None:
        """Draft from the state that a prompt pass ended in, and leave the first round's inputs in the slots."""
        self.offers.expect(ends.slot_ids)
        self.drafts.start(self.parts.slots, ends, self._collect(self.parts.backend, state, nullcontext))

    def _collect(self, mover: MetadataMover, state: Any, scope: StepScope) -> Any:
        """Take the drafts from `state`."""
        drafts, self.num_drafted = self.drafts.collect(self.offers, mover, state, scope)
        return drafts


@dataclass(frozen=True, slots=True)
class Rounds:
    """The round of an engine, and those of smaller K where K follows from the number of running requests.

    `host`: puts drafts that the host makes in front of a round; None where it makes none. `limits`: tells the device
    the K of each request, and `plain` is the round where none drafts any more; None where all have the same.
    """

    widest: DecodeRound
    schedule: KSchedule | None = None
    narrower: Mapping[int, DecodeRound] = field(default_factory=dict)
    host: HostDrafts | None = None
    limits: RequestLimits | None = None
    plain: DecodeRound | None = None

    def of_batch(self, num_requests: int) -> DecodeRound:
        """Return the round for so many running requests."""
        if self.schedule is None:
            return self.widest
        return self.narrower.get(self.schedule.k_of(num_requests), self.widest)

    def of_requests(self, sequences: List[Sequence]) -> DecodeRound:
        """Return the round for running requests, which the device is told the K of."""
        if self.limits is not None and self.plain is not None and self.limits.tell(sequences) == OFF:
            return self.plain
        return self.of_batch(len(sequences))

    def with_room_for(self, decode_round: DecodeRound, longest: int) -> DecodeRound:
        """Return the narrowest round with room for `longest` drafts of the host, and those of the device."""
        assert self.host is not None
        fewest = self.host.drafter.num_on_device
        fits = longest <= fewest < decode_round.num_draft_tokens
        return self.narrower.get(fewest, decode_round) if fits else decode_round

    def to_prepare(self, num_requests: int) -> list[DecodeRound]:
        """Return the rounds that there may be of so many requests."""
        usual = self.of_batch(num_requests)
        rounds = [usual] if self.host is None else [usual, self.with_room_for(usual, 0)]
        return [*rounds, *([] if self.plain is None else [self.plain])]
