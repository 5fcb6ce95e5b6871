"""One decode round: verify, accept, catch up, recur, commit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from spec_lab.core.protocols import AcceptanceRule, AttentionBackend, Drafter, StageTimer, State, Target
from spec_lab.core.types import AcceptanceInputs, DraftStep, RoundBatch, TargetOutput, Verification, VerifiedRound
from spec_lab.engine.kv_cache import PagedKVCache
from spec_lab.engine.slots import SlotState
from spec_lab.pruning.selection import AllRows


@dataclass(slots=True)
class Parts:
    """Everything a round is made of."""

    target: Target
    drafter: Drafter[Any]
    rule: AcceptanceRule
    backend: AttentionBackend
    cache: PagedKVCache
    slots: SlotState
    timer: StageTimer


class DecodeRound:
    """Runs rounds. Everything up to the end of `run` stays on the device."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def run(self, batch: RoundBatch) -> Verification:
        """One round over `batch`; leaves the next round's inputs in the slots."""
        parts = self._parts
        span = parts.timer.span
        with span("verify"):
            output, logits = self._verify(batch)
        with span("accept"):
            verification = parts.rule.accept(self._acceptance_inputs(batch, logits))
        with span("catchup"):
            state = parts.drafter.seed(VerifiedRound(batch, verification, output.features))
        with span("recur"):
            draft_tokens = collect_drafts(parts.drafter, parts.backend, state)
        with span("commit"):
            parts.slots.commit(batch, verification, draft_tokens)
        return verification

    def _verify(self, batch: RoundBatch) -> tuple[TargetOutput, torch.Tensor]:
        """Target forward over N rows a request at positions L..L+K; logits [batch, N, vocab]."""
        parts = self._parts
        batch_size, num_rows = batch.input_ids.shape
        attention = parts.backend.build(
            positions=batch.kv_lens.unsqueeze(1) + torch.arange(num_rows, device=batch.kv_lens.device),
            seq_lens=batch.kv_lens + num_rows,
            page_table=batch.page_table,
            max_seq_len=batch.max_kv_len + num_rows,
        )
        features = parts.drafter.requirements.features
        output = parts.target.forward(batch.input_ids.reshape(-1), parts.cache, attention, AllRows(), features)
        return output, parts.target.logits(output.hidden).view(batch_size, num_rows, -1)

    def _acceptance_inputs(self, batch: RoundBatch, logits: torch.Tensor) -> AcceptanceInputs:
        return AcceptanceInputs(
            logits=logits,
            draft_tokens=batch.draft_tokens,
            active=batch.active,
            slot_ids=batch.slot_ids,
            kv_lens=batch.kv_lens,
            draft_logits=self._parts.drafter.kept_logits(batch.slot_ids),
        )


def collect_drafts(drafter: Drafter[State], backend: AttentionBackend, state: State) -> torch.Tensor:
    """Draft 1 from `state`, then one recurrent step for each further draft: [batch, num_draft_tokens]."""
    num_draft_tokens = drafter.num_draft_tokens
    drafts = state.tokens.new_zeros((state.tokens.shape[0], num_draft_tokens))
    columns = torch.arange(num_draft_tokens, device=drafts.device)
    for index in range(num_draft_tokens):
        if index > 0:
            if state.attention is not None:
                backend.advance(state.attention)
            drafter.step(state, DraftStep(index, columns[index : index + 1]))
        drafts[:, index] = state.tokens
    return drafts
