"""A decode round verifies, accepts, catches up, recurs and commits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from spec_lab.core.kv_cache import PagedKVCache
from spec_lab.core.layer_protocols import AttentionBackend, MetadataMover
from spec_lab.core.prompts import PromptEnds
from spec_lab.core.protocols import AcceptanceRule, Drafter, StageTimer, State, Target
from spec_lab.core.types import (
    AcceptanceInputs,
    AttentionMetadata,
    DraftStep,
    RoundBatch,
    Verification,
    VerifiedRound,
)
from spec_lab.engine.experts_read import ExpertsRead, ReadingStage
from spec_lab.engine.slots import SlotState
from spec_lab.pruning.selection import AllRows


@dataclass(slots=True)
class Parts:
    """Holds everything a round is made of. `mover` is the backend, unless its metadata is made stale on purpose."""

    target: Target
    drafter: Drafter[Any]
    rule: AcceptanceRule
    backend: AttentionBackend
    mover: MetadataMover
    cache: PagedKVCache
    slots: SlotState
    timer: StageTimer
    experts_read: ExpertsRead


@dataclass(slots=True)
class VerifyOutput:
    """Holds the target's answer to a batch: logits [batch, N, vocab], and the drafter's features [batch * N, ...]."""

    batch: RoundBatch
    logits: torch.Tensor
    features: torch.Tensor | None


class DecodeRound:
    """Has the stages of a round. Each touches device tensors only, so that a graph mode may capture any stretch.

    Attributes:
        tree_rows: rows a request of verify, where drafts are a tree.
        num_draft_tokens: K, the most drafts a request that are verified.
        max_drafted: the most drafts a request that the draft loop makes.
        num_drafted: how many it made in the round that was run last.
    """

    tree_rows: int | None = None

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.num_draft_tokens = self.max_drafted = self.num_drafted = parts.drafter.num_draft_tokens

    def of_batch(self, num_requests: int) -> DecodeRound:
        """Return the round for so many running requests, which is this one unless K follows from their number."""
        return self

    def run(self, batch: RoundBatch) -> Verification:
        """Run one round over `batch`, and leave the next round's inputs in the slots."""
        verified = self.accept(self.verify(batch))
        state = self.catch_up(verified)
        drafts = self.recur(state)
        self.commit(verified, drafts)
        return verified.verification

    def waiting_drafts(self, slots: list[int]) -> list[list[int]]:
        """Tell the host the K drafts that wait in each of `slots` to be verified, for whoever examines them."""
        drafts: list[list[int]] = self.parts.slots.input_ids[slots, 1:].tolist()
        return drafts

    def load(self, slot_ids: torch.Tensor, max_kv_len: int) -> RoundBatch:
        """Read the rows of [batch] slots from the slot state."""
        return self.parts.slots.batch(slot_ids, max_kv_len)

    def verify(self, batch: RoundBatch) -> VerifyOutput:
        """Run the target over N rows a request."""
        parts = self.parts
        batch_size, num_rows = batch.input_ids.shape
        parts.experts_read.begin_round(batch.active)
        with parts.timer.span("verify"), parts.experts_read.stage(ReadingStage.VERIFY):
            attention = self.attention(batch)
            features = parts.drafter.requirements.features
            output = parts.target.forward(batch.input_ids.reshape(-1), parts.cache, attention, AllRows(), features)
            logits = parts.target.logits(output.hidden).view(batch_size, num_rows, -1)
        return VerifyOutput(batch, logits, output.features)

    def attention(self, batch: RoundBatch) -> AttentionMetadata:
        """Build the metadata of verify's rows, at positions L..L+K."""
        num_rows = batch.input_ids.shape[1]
        attention = self.parts.backend.build(
            positions=batch.kv_lens.unsqueeze(1) + torch.arange(num_rows, device=batch.kv_lens.device),
            seq_lens=batch.kv_lens + num_rows,
            page_table=batch.page_table,
            max_seq_len=batch.max_kv_len + num_rows,
        )
        attention.recurrent = batch.recurrent
        return attention

    def accept(self, output: VerifyOutput) -> VerifiedRound:
        """Let the rule judge the drafts."""
        with self.parts.timer.span("accept"):
            verification = self.parts.rule.accept(self.judged(output))
            return VerifiedRound(output.batch, verification, output.features)

    def judged(self, output: VerifyOutput) -> AcceptanceInputs:
        """Collect what the rule judges by."""
        batch = output.batch
        return AcceptanceInputs(
            logits=output.logits,
            draft_tokens=batch.draft_tokens,
            active=batch.active,
            slot_ids=batch.slot_ids,
            kv_lens=batch.kv_lens,
            draft_logits=self.parts.drafter.kept_logits(batch.slot_ids),
        )

    def catch_up(self, verified: VerifiedRound) -> Any:
        """Run the drafter's catch-up step (its first step, if it has no cache of its own): the state with draft 1."""
        with self.parts.timer.span("catchup"), self.parts.experts_read.stage(ReadingStage.CATCHUP):
            return self.parts.drafter.catch_up(verified)

    def recur(self, state: Any) -> Any:
        """Run the other draft steps, and return all drafts of the round: [batch, num_draft_tokens] of a chain."""
        with self.parts.timer.span("recur"), self.parts.experts_read.stage(ReadingStage.RECUR):
            return self._drafts(state, self.parts.mover)

    def commit(self, verified: VerifiedRound, drafts: Any) -> None:
        """Leave the next round's inputs in the slots; the host has read nothing yet."""
        with self.parts.timer.span("commit"):
            self.parts.slots.commit(verified.batch, verified.verification, drafts)

    def start(self, ends: PromptEnds, state: Any) -> None:
        """Draft from the state that a prompt pass ended in, and leave the first round's inputs in the slots."""
        self.parts.slots.start(ends, self._drafts(state, self.parts.backend))

    def _drafts(self, state: Any, mover: MetadataMover) -> torch.Tensor:
        """Run the steps behind draft 1: at once where the drafter can, and metadata moves as the backend moves it."""
        rest = self.parts.drafter.requirements.draft_rest
        if rest is not None and mover is self.parts.backend:
            return rest(state)
        return collect_drafts(self.parts.drafter, mover, state)


def collect_drafts(
    drafter: Drafter[State],
    mover: MetadataMover,
    state: State,
    num_draft_tokens: int | None = None,
    is_over: Callable[[], bool] | None = None,
) -> torch.Tensor:
    """Take draft 1 from `state`, and run a recurrent step for each further one: [batch, num_draft_tokens].

    Args:
        num_draft_tokens: as many as the drafter has where it is None.
        is_over: tells whether no draft is wanted behind the one just made; None where all are.
    """
    if num_draft_tokens is None:
        num_draft_tokens = drafter.num_draft_tokens
    drafts = state.tokens.new_zeros((state.tokens.shape[0], num_draft_tokens))
    columns = torch.arange(num_draft_tokens, device=drafts.device)
    for index in range(num_draft_tokens):
        if index > 0:
            if is_over is not None and is_over():
                return drafts[:, :index]
            if state.attention is not None:
                mover.advance(state.attention)
            drafter.step(state, DraftStep(index, columns[index : index + 1]))
        drafts[:, index] = state.tokens
    return drafts
