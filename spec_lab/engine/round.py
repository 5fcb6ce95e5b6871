"""The decode round: verify, accept, catch up, recur, commit."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from spec_lab.core.layer_protocols import MetadataMover
from spec_lab.core.passes import Pass
from spec_lab.core.prompts import PromptEnds
from spec_lab.core.types import FeatureSpec, RoundBatch, Verification, VerifiedRound
from spec_lab.engine.drafts import Drafts, StepScope
from spec_lab.engine.experts_read import ReadingStage
from spec_lab.engine.offers import Offers
from spec_lab.engine.parts import Parts, VerifyOutput


class DecodeRound:
    """The five stages of a round. A graph mode may capture any part of them.

    In captured modes the stages use device tensors only. Without a capture, a drafter may also read values on the host.

    `drafts` defines the shape of the drafts, and `offers` how many of them may be accepted.

    Attributes:
        num_drafted: drafts for each request that the device makes; levels of a tree.
        num_verified: rows for each request in verify.
        num_catchup_rows: rows for each request of the catch-up step, 0 if the drafter does not run; None if they are
            those of verify.
    """

    num_catchup_rows: int | None = None

    def __init__(self, parts: Parts, drafts: Drafts, offers: Offers) -> None:
        self.parts = parts
        self.drafts = drafts
        self.offers = offers
        self.num_drafted = offers.max_drafted
        self.num_verified = offers.num_draft_tokens + 1 if drafts.tree_rows is None else drafts.tree_rows

    @property
    def num_draft_tokens(self) -> int:
        """K, the most drafts of a request that one round can accept."""
        return self.offers.num_draft_tokens

    @property
    def features(self) -> FeatureSpec:
        """Return which features the target computes for the drafter."""
        return self.parts.drafter.requirements.features

    def run(self, batch: RoundBatch) -> Verification:
        """Run one round over `batch`, and write the next round's inputs to the slots."""
        verified = self.accept(self.verify(batch))
        drafts = self.recur(self.catch_up(verified))
        self.commit(verified, drafts)
        return verified.verification

    def waiting_drafts(self, slots: list[int]) -> list[list[int]]:
        """Read back to the host, for inspection, the drafts in each of `slots`; of a tree, those of its spine."""
        return self.drafts.waiting(self.parts.slots, slots)

    def load(self, slot_ids: torch.Tensor, max_kv_len: int) -> RoundBatch:
        """Read the rows of [batch] slots from the slot state."""
        return self.offers.mark(self.drafts.mark(self.parts.slots.batch(slot_ids, max_kv_len)))

    def verify(self, batch: RoundBatch) -> VerifyOutput:
        """Run the target over N rows for each request."""
        parts = self.parts
        batch_size, num_rows = batch.input_ids.shape
        parts.experts_read.begin_round(batch.active)
        with parts.timer.span("verify"), parts.experts_read.stage(ReadingStage.VERIFY):
            attention = self.drafts.attention(batch)
            token_ids = batch.input_ids.reshape(-1)
            output = parts.target.forward(token_ids, Pass(parts.cache, attention), self.features)
            logits = parts.target.logits(output.hidden).view(batch_size, num_rows, -1)
        return VerifyOutput(batch, logits, output.features)

    def accept(self, output: VerifyOutput) -> VerifiedRound:
        """Let the rule judge the drafts."""
        with self.parts.timer.span("accept"):
            kept = self.parts.drafter.kept_logits(output.batch.slot_ids)
            verified = self.drafts.judge(output, kept)
            verified.verification.num_offered = output.batch.num_drafts
            verified.verification.confidences = output.batch.confidences
            return verified

    def catch_up(self, verified: VerifiedRound) -> Any:
        """Run the drafter's catch-up step (its first step, if it has no cache), and return the state with draft 1."""
        with self.parts.timer.span("catchup"), self.parts.experts_read.stage(ReadingStage.CATCHUP):
            state = self.parts.drafter.catch_up(verified)
        self.offers.expect(verified.batch.slot_ids)
        return state

    def recur(self, state: Any) -> Any:
        """Run the other draft steps, and return all drafts of the round: a chain [batch, drafts], or a tree."""
        with self.parts.timer.span("recur"):
            return self._collect(self.parts.mover, state, partial(self.parts.experts_read.stage, ReadingStage.RECUR))

    def commit(self, verified: VerifiedRound, drafts: Any) -> None:
        """Write the next round's inputs to the slots."""
        with self.parts.timer.span("commit"):
            verified.verification.made_confidences = self.offers.made_confidences(verified.batch.slot_ids)
            self.drafts.leave(self.parts.slots, verified, drafts)

    def start(self, ends: PromptEnds, state: Any) -> None:
        """Draft from the state at the end of a prompt pass, and write the first round's inputs to the slots."""
        self.offers.expect(ends.slot_ids)
        self.drafts.start(self.parts.slots, ends, self._collect(self.parts.backend, state, nullcontext))

    def _collect(self, mover: MetadataMover, state: Any, scope: StepScope) -> Any:
        """Run the remaining draft steps from `state`, and return all drafts."""
        return self.drafts.collect(self.num_drafted, mover, state, scope)
