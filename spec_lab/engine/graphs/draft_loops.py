"""Three graph modes that capture the draft steps in different ways. Verify is a separate graph, or is not captured."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from spec_lab.core.trees import copy_tensors
from spec_lab.core.types import AttentionMetadata, DraftStep, Verification, VerifiedRound
from spec_lab.engine.experts_read import ReadingStage
from spec_lab.engine.graphs.captured import Bucket, CapturedMode
from spec_lab.engine.parts import VerifyOutput
from spec_lab.engine.round import DecodeRound


@dataclass(eq=False)
class SeparateVerify(CapturedMode):
    """Replays verify as one graph or launches it eagerly, launches accept and commit, and leaves drafting to a
    subclass.

    With a drafter that drafts nothing, verify is all there is to capture.
    """

    capture_verify: bool = True

    def _run(self, bucket: Bucket, decode_round: DecodeRound, slot_ids: torch.Tensor) -> Verification:
        verified = decode_round.accept(self._verify(bucket, decode_round, slot_ids))
        if decode_round.parts.drafter.num_draft_tokens:
            drafts = self._draft(bucket, decode_round, verified)
        else:
            drafts = decode_round.recur(decode_round.catch_up(verified))
        decode_round.commit(verified, drafts)
        return verified.verification

    def _verify(self, bucket: Bucket, decode_round: DecodeRound, slot_ids: torch.Tensor) -> VerifyOutput:
        def load_and_verify(slot_ids: torch.Tensor) -> VerifyOutput:
            return decode_round.verify(decode_round.load(slot_ids, self.max_kv_len))

        if not self.capture_verify:
            return load_and_verify(slot_ids)
        output: VerifyOutput = self._segment(bucket, decode_round, "verify", load_and_verify)(slot_ids)
        return output

    @abstractmethod
    def _draft(self, bucket: Bucket, decode_round: DecodeRound, verified: VerifiedRound) -> Any:
        """Return the drafts of the round, as `DecodeRound.recur` does."""


class SplitSeed(SeparateVerify):
    """graph=split_seed: the first draft step is launched eagerly, and the others are one graph.

    SGLang, which calls the first one the seed step, worked like this before #25539.
    """

    def _draft(self, bucket: Bucket, decode_round: DecodeRound, verified: VerifiedRound) -> Any:
        state = decode_round.catch_up(verified)
        if decode_round.offers.max_drafted < 2:
            return decode_round.recur(state)
        return self._segment(bucket, decode_round, "recur", decode_round.recur)(state)


class FullLoop(SeparateVerify):
    """graph=full_loop: one graph holds the catch-up step (or first step), all other draft steps and the metadata
    updates between them (SGLang #25539, vLLM #46849).
    """

    def _draft(self, bucket: Bucket, decode_round: DecodeRound, verified: VerifiedRound) -> Any:
        def draft(verified: VerifiedRound) -> Any:
            return decode_round.recur(decode_round.catch_up(verified))

        return self._segment(bucket, decode_round, "draft", draft)(verified)


@dataclass(slots=True)
class StepInputs:
    """The tensors that one captured step reads and rewrites: the state, column [1], and all drafts [batch, drafts]."""

    state: Any
    column: torch.Tensor
    drafts: torch.Tensor


DraftCarry = Callable[[torch.Tensor, torch.Tensor, Any, Any], None]
"""Does the work between two replayed draft steps: `carry_every_tensor`, or an equivalent kernel."""


def carry_every_tensor(drafts: torch.Tensor, column: torch.Tensor, before: Any, after: Any) -> None:
    """Prepare the next replay.

    The tokens of state `after` go to `column` [1] of drafts [batch, K]. Every tensor that the step replaced goes to its
    counterpart in `before`, which the next replay reads.
    """
    drafts.index_copy_(1, column, after.tokens.unsqueeze(1))
    for part in dataclasses.fields(after):
        old, new = getattr(before, part.name), getattr(after, part.name)
        if isinstance(new, torch.Tensor) and new is not old:
            old.copy_(new)


@dataclass(eq=False)
class StepReplay(SeparateVerify):
    """graph=step_replay: the first step is one graph, and one recurrent step is another, replayed K - 1 times.

    Between replays the host builds the step's metadata again, if it advances, and copies all its tensors to where the
    graph reads them (vLLM #41162). It does so once for each kind of cache and window, as vLLM does for each KV cache
    group. Steps with weights of their own have a graph each.

    The number of the step is a device tensor, which selects the column of drafts and draft logits.
    """

    carry: DraftCarry = carry_every_tensor

    def _draft(self, bucket: Bucket, decode_round: DecodeRound, verified: VerifiedRound) -> torch.Tensor:
        drafter = decode_round.parts.drafter

        def first(verified: VerifiedRound) -> StepInputs:
            return first_step(decode_round, verified)

        # "seed" is SGLang's name for the first step; records list the nodes of this graph under it.
        inputs: StepInputs = self._segment(bucket, decode_round, "seed", first, stage="catchup")(verified)
        for index in range(1, decode_round.offers.max_drafted):
            inputs.column.fill_(index)
            if inputs.state.attention is not None:
                rebuild(decode_round, inputs.state.attention)
            number = index if drafter.requirements.distinct_steps else 1

            def step(inputs: StepInputs, number: int = number) -> None:
                next_step(decode_round, inputs, number, self.carry)

            self._segment(bucket, decode_round, f"step_{number}", step, stage="recur")(inputs)
        return inputs.drafts


def first_step(decode_round: DecodeRound, verified: VerifiedRound) -> StepInputs:
    """Run the catch-up (or first) step, and make the buffers of the other steps."""
    state = decode_round.catch_up(verified)
    if state.attention is not None:  # `rebuild` fills what is derived here
        attention = dataclasses.replace(state.attention, read_slots=None, masks={})
        for kind in decode_round.parts.drafter.requirements.step_kinds:
            decode_round.parts.backend.derive(attention, kind, decode_round.parts.cache.dtype)
        state = dataclasses.replace(state, attention=attention)
    drafts = state.tokens.new_zeros((state.tokens.shape[0], decode_round.offers.max_drafted))
    if decode_round.offers.max_drafted:
        drafts[:, 0] = state.tokens
    return StepInputs(state, torch.zeros(1, dtype=torch.int64, device=drafts.device), drafts)


def next_step(decode_round: DecodeRound, inputs: StepInputs, number: int, carry: DraftCarry) -> None:
    """Run one recurrent step, and write its result to the buffers that the next replay reads."""
    before = inputs.state
    state = dataclasses.replace(before)
    parts = decode_round.parts
    with parts.timer.span("recur"), parts.experts_read.stage(ReadingStage.RECUR):
        decode_round.parts.drafter.step(state, DraftStep(number, inputs.column))
        carry(inputs.drafts, inputs.column, before, state)


def rebuild(decode_round: DecodeRound, attention: AttentionMetadata) -> None:
    """Build the metadata that `AttentionBackend.advance` would update in place, for each kind of attention, and copy
    all its tensors to the step's buffers."""
    parts, seq_lens = decode_round.parts, attention.seq_lens.clone()
    for kind in parts.drafter.requirements.step_kinds or (None,):
        fresh = parts.backend.build(
            positions=seq_lens.unsqueeze(1),
            seq_lens=seq_lens + 1,
            page_table=attention.page_table,
            max_seq_len=attention.max_seq_len,
        )
        if kind is not None:
            parts.backend.derive(fresh, kind, parts.cache.dtype)
        masks = {key: attention.masks[key] for key in fresh.masks}
        copy_tensors(dataclasses.replace(attention, masks=masks), fresh)
