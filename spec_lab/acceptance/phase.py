"""A text has a thinking phase, between a begin and an end marker, in which a relaxed rule may relax.

`TokenPhase` is ours: the phase belongs to a token, follows from the last marker before it, and starts from the whole
prompt. `RoundPhase` is what TensorRT-LLM's relaxed acceptance does (`mtp_relaxed_acceptance_op` and the Python beside
it, PR #3865), kept for comparison.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class ThinkingMarkers:
    """The token ids of the begin and the end marker, from the tokenizer."""

    begin: int
    end: int

    def leave_open(self, token_ids: Sequence[int]) -> bool:
        """Tell whether the last marker of a text is a begin marker."""
        last = next((token for token in reversed(token_ids) if token in (self.begin, self.end)), self.end)
        return last == self.begin

    def match(self, tokens: torch.Tensor) -> torch.Tensor:
        return (tokens == self.begin) | (tokens == self.end)


def phase_before(prompt_ids: Sequence[int], output_ids: Sequence[int], markers: ThinkingMarkers) -> list[bool]:
    """Say of each output token whether thinking is open in front of it: the phase of the row that predicts it."""
    inside, phases = markers.leave_open(prompt_ids), []
    for token in output_ids:
        phases.append(inside)
        inside = (inside or token == markers.begin) and token != markers.end
    return phases


def thinking_mask(prompt_ids: Sequence[int], output_ids: Sequence[int], markers: ThinkingMarkers) -> list[bool]:
    """Say of each output token whether it lies inside thinking; the markers themselves do not. The reports use it."""
    phases = phase_before(prompt_ids, output_ids, markers)
    pairs = zip(phases, output_ids, strict=True)
    return [inside and token not in (markers.begin, markers.end) for inside, token in pairs]


class PhaseState:
    """By slot, whether the text leaves thinking open: [num_slots + 1] bool, the last one the scratch slot's."""

    def __init__(self, num_slots: int, markers: ThinkingMarkers, device: torch.device) -> None:
        self._markers = markers
        self._inside = torch.zeros(num_slots + 1, dtype=torch.bool, device=device)

    def set(self, slot: int, inside: bool) -> None:
        self._inside[slot] = inside

    def now(self, slot_ids: torch.Tensor) -> torch.Tensor:
        """Return the phase of each slot now, [batch]."""
        return self._inside.index_select(0, slot_ids)

    def before(self, slot_ids: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Turn [batch, length] tokens into [batch, length + 1] phases: those in front of each token, and behind the
        last."""
        columns = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        changes = torch.where(self._markers.match(tokens), columns, 0)
        start = torch.zeros_like(slot_ids).unsqueeze(1)
        latest_change = torch.cat((start, changes), dim=1).cummax(dim=1).values
        opens = torch.cat((self.now(slot_ids).unsqueeze(1), tokens == self._markers.begin), dim=1)
        return opens.gather(1, latest_change)

    def behind_rows(self, slot_ids: torch.Tensor, tokens: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """Turn a tree's [batch, N] tokens into the phases [batch, N] behind its rows, on the way to each of them.

        `visible` [batch, N, N] are each row's ancestors and itself; the root's token is a part of the text already.
        """
        depths = visible.sum(dim=2) - 1
        # Of the markers on a way the deepest one counts, so a marker's number is twice its depth, and odd if it opens.
        numbers = torch.where(self._markers.match(tokens), 2 * depths + (tokens == self._markers.begin), 0)
        latest = torch.where(visible, numbers.unsqueeze(1), 0).amax(dim=2)
        return torch.where(latest >= 2, latest % 2 == 1, self.now(slot_ids).unsqueeze(1))

    def advance(self, slot_ids: torch.Tensor, tokens: torch.Tensor, num_emitted: torch.Tensor) -> None:
        """Take the first `num_emitted` [batch] of `tokens` [batch, N]; a row that emits 0 keeps its phase."""
        after = self.before(slot_ids, tokens).gather(1, num_emitted.unsqueeze(1)).squeeze(1)
        self._inside.index_copy_(0, slot_ids, after)

    def count(self, slot_ids: torch.Tensor, tokens: torch.Tensor, num_emitted: torch.Tensor) -> torch.Tensor:
        """Count [batch] how many of the first `num_emitted` tokens lie inside thinking, without the markers. Call it
        before `advance`."""
        emitted = torch.arange(tokens.shape[1], device=tokens.device) < num_emitted.unsqueeze(1)
        inside = self.before(slot_ids, tokens)[:, :-1] & ~self._markers.match(tokens)
        return (inside & emitted).sum(dim=1)


class RelaxationPhase(Protocol):
    """Decides when a rule may relax. `thinking` is the phase of the text, `least` what the rule makes of it."""

    thinking: PhaseState

    def admit(self, slot: int, prompt_ids: Sequence[int]) -> None: ...

    def least(
        self, slot_ids: torch.Tensor, draft_tokens: torch.Tensor, top: torch.Tensor, relaxed: torch.Tensor
    ) -> torch.Tensor:
        """Return the least probability with which a draft token other than the argmax may be accepted.

        Args:
            draft_tokens: [batch, K].
            top: [batch, K] the largest probability of each row.
            relaxed: [batch, K] the threshold where the rule relaxes.

        Returns:
            [batch, K]; infinite where only the argmax is accepted.
        """
        ...

    def least_inside(
        self,
        slot_ids: torch.Tensor,
        inside: torch.Tensor,
        draft_tokens: torch.Tensor,
        top: torch.Tensor,
        relaxed: torch.Tensor,
    ) -> torch.Tensor:
        """Return the same, of drafts [batch, K] that need not follow each other: `inside` [batch, K] tells whether
        thinking is open in front of each."""
        ...

    def advance(self, slot_ids: torch.Tensor, tokens: torch.Tensor, num_emitted: torch.Tensor) -> None: ...


class TokenPhase:
    """phase=token: a marker inside the block switches the rule for the positions behind it.

    Never relaxes onto a marker or EOS: a phase must not end or begin, nor a text end, by a token that was not the
    target's choice.
    """

    def __init__(
        self, num_slots: int, markers: ThinkingMarkers, eos_token_ids: Collection[int], device: torch.device
    ) -> None:
        self.thinking = PhaseState(num_slots, markers, device)
        self._markers = markers
        protected = sorted({markers.begin, markers.end, *eos_token_ids})
        self._protected = torch.tensor(protected, dtype=torch.int64, device=device)

    def admit(self, slot: int, prompt_ids: Sequence[int]) -> None:
        self.thinking.set(slot, self._markers.leave_open(prompt_ids))

    def least(
        self, slot_ids: torch.Tensor, draft_tokens: torch.Tensor, top: torch.Tensor, relaxed: torch.Tensor
    ) -> torch.Tensor:
        inside = self.thinking.before(slot_ids, draft_tokens)[:, :-1]
        return self.least_inside(slot_ids, inside, draft_tokens, top, relaxed)

    def least_inside(
        self,
        slot_ids: torch.Tensor,
        inside: torch.Tensor,
        draft_tokens: torch.Tensor,
        top: torch.Tensor,
        relaxed: torch.Tensor,
    ) -> torch.Tensor:
        protected = (draft_tokens.unsqueeze(-1) == self._protected).any(dim=-1)
        return torch.where(inside & ~protected, relaxed, torch.inf)

    def advance(self, slot_ids: torch.Tensor, tokens: torch.Tensor, num_emitted: torch.Tensor) -> None:
        self.thinking.advance(slot_ids, tokens, num_emitted)


class RoundPhase:
    """phase=round does what TensorRT-LLM does, to the letter.

    Its pool holds `delta` or 0 for each slot: here a bool. It is read once a round, so markers take effect in the next
    one. The prompt sets it when its last chunk holds any begin marker, whatever follows it, and clears it otherwise:
    each chunk overwrites what an earlier one found. Outside thinking delta is 0, which is not strict: a candidate
    exactly as likely as the argmax is accepted. Markers and EOS are relaxed onto like any token.
    """

    def __init__(self, num_slots: int, markers: ThinkingMarkers, prefill_chunk: int, device: torch.device) -> None:
        self.thinking = PhaseState(num_slots, markers, device)
        self._relaxing = PhaseState(num_slots, markers, device)
        self._markers = markers
        self._prefill_chunk = prefill_chunk

    def admit(self, slot: int, prompt_ids: Sequence[int]) -> None:
        self.thinking.set(slot, self._markers.leave_open(prompt_ids))
        last_chunk = prompt_ids[(len(prompt_ids) - 1) // self._prefill_chunk * self._prefill_chunk :]
        self._relaxing.set(slot, self._markers.begin in last_chunk)

    def least(
        self, slot_ids: torch.Tensor, draft_tokens: torch.Tensor, top: torch.Tensor, relaxed: torch.Tensor
    ) -> torch.Tensor:
        return torch.where(self._relaxing.now(slot_ids).unsqueeze(1), relaxed, top)

    def least_inside(
        self,
        slot_ids: torch.Tensor,
        inside: torch.Tensor,
        draft_tokens: torch.Tensor,
        top: torch.Tensor,
        relaxed: torch.Tensor,
    ) -> torch.Tensor:
        return self.least(slot_ids, draft_tokens, top, relaxed)

    def advance(self, slot_ids: torch.Tensor, tokens: torch.Tensor, num_emitted: torch.Tensor) -> None:
        self.thinking.advance(slot_ids, tokens, num_emitted)
        self._relaxing.advance(slot_ids, tokens, num_emitted)
