"""The thinking phase of a text, between a begin and an end marker, in which a relaxed rule may relax.

`TokenPhase` is this lab's form. Each token has a phase, which the last marker before it determines; the prompt's
markers count. `RoundPhase` reproduces TensorRT-LLM's relaxed acceptance (`mtp_relaxed_acceptance_op` and its Python
code, PR #3865) for comparison.
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
        """Return whether the last marker of a text is a begin marker."""
        last = next((token for token in reversed(token_ids) if token in (self.begin, self.end)), self.end)
        return last == self.begin

    def hide_answer(self, prompt_ids: Sequence[int], eos_token_ids: Collection[int]) -> bool:
        """Return whether an output has no answer before its first end marker. An end of sequence as the end marker
        makes thinking of the whole output, the answer included."""
        return self.leave_open(prompt_ids) and self.end not in eos_token_ids

    def match(self, tokens: torch.Tensor) -> torch.Tensor:
        return (tokens == self.begin) | (tokens == self.end)


def phase_before(prompt_ids: Sequence[int], output_ids: Sequence[int], markers: ThinkingMarkers) -> list[bool]:
    """Return for each output token whether thinking is open before it: the phase of the row that predicts it."""
    inside, phases = markers.leave_open(prompt_ids), []
    for token in output_ids:
        phases.append(inside)
        inside = (inside or token == markers.begin) and token != markers.end
    return phases


def thinking_mask(prompt_ids: Sequence[int], output_ids: Sequence[int], markers: ThinkingMarkers) -> list[bool]:
    """Return for each output token whether it is inside thinking, markers excluded. Reports use it."""
    phases = phase_before(prompt_ids, output_ids, markers)
    pairs = zip(phases, output_ids, strict=True)
    return [inside and token not in (markers.begin, markers.end) for inside, token in pairs]


class PhaseState:
    """The phase at the end of each slot's text, [num_slots + 1] bool: whether thinking is open. The last entry is the
    scratch slot."""

    def __init__(self, num_slots: int, markers: ThinkingMarkers, device: torch.device) -> None:
        self._markers = markers
        self._inside = torch.zeros(num_slots + 1, dtype=torch.bool, device=device)

    def set(self, slot: int, inside: bool) -> None:
        self._inside[slot] = inside

    def now(self, slot_ids: torch.Tensor) -> torch.Tensor:
        """Return the current phase of each slot, [batch]."""
        return self._inside.index_select(0, slot_ids)

    def before(self, slot_ids: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the phases [batch, length + 1] before each of `tokens` [batch, length], and after the last."""
        columns = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        changes = torch.where(self._markers.match(tokens), columns, 0)
        start = torch.zeros_like(slot_ids).unsqueeze(1)
        latest_change = torch.cat((start, changes), dim=1).cummax(dim=1).values
        opens = torch.cat((self.now(slot_ids).unsqueeze(1), tokens == self._markers.begin), dim=1)
        return opens.gather(1, latest_change)

    def behind_rows(self, slot_ids: torch.Tensor, tokens: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """Return the phases [batch, N] after each row of a tree with `tokens` [batch, N], along the path to the row.

        `visible` [batch, N, N] marks each row's ancestors and itself. The slot's phase already includes the
        root's token.
        """
        depths = visible.sum(dim=2) - 1
        # The deepest marker on a path counts. So a marker's number is twice its depth, plus 1 if it is a begin marker.
        numbers = torch.where(self._markers.match(tokens), 2 * depths + (tokens == self._markers.begin), 0)
        latest = torch.where(visible, numbers.unsqueeze(1), 0).amax(dim=2)
        return torch.where(latest >= 2, latest % 2 == 1, self.now(slot_ids).unsqueeze(1))

    def advance(self, slot_ids: torch.Tensor, tokens: torch.Tensor, num_emitted: torch.Tensor) -> None:
        """Update the phases with the first `num_emitted` [batch] of `tokens` [batch, N]; with 0 the phase stays."""
        after = self.before(slot_ids, tokens).gather(1, num_emitted.unsqueeze(1)).squeeze(1)
        self._inside.index_copy_(0, slot_ids, after)

    def count(self, slot_ids: torch.Tensor, tokens: torch.Tensor, num_emitted: torch.Tensor) -> torch.Tensor:
        """Count the tokens inside thinking, markers excluded, among the first `num_emitted`; return [batch]. It must be
        called before `advance`."""
        emitted = torch.arange(tokens.shape[1], device=tokens.device) < num_emitted.unsqueeze(1)
        inside = self.before(slot_ids, tokens)[:, :-1] & ~self._markers.match(tokens)
        return (inside & emitted).sum(dim=1)


class RelaxationPhase(Protocol):
    """Decides when a rule may relax. `thinking` is the phase of the text; `least` gives the thresholds of a round."""

    thinking: PhaseState

    def admit(self, slot: int, prompt_ids: Sequence[int]) -> None: ...

    def least(
        self,
        slot_ids: torch.Tensor,
        draft_tokens: torch.Tensor,
        top: torch.Tensor,
        relaxed: torch.Tensor,
        inside: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the least probability with which a draft token other than the argmax may be accepted.

        Args:
            draft_tokens: [batch, K].
            top: [batch, K] the largest probability of each row.
            relaxed: [batch, K] the threshold for rows in which the rule relaxes.
            inside: [batch, K] whether thinking is open before each draft; None for the drafts of a chain.

        Returns:
            [batch, K]; infinite for rows in which only the argmax is accepted.
        """
        ...

    def advance(self, slot_ids: torch.Tensor, tokens: torch.Tensor, num_emitted: torch.Tensor) -> None: ...


class TokenPhase:
    """phase=token: a marker among the drafts switches the rule for the positions after it, up to the next marker.

    Markers and EOS are never accepted by relaxation. Only a token that the target chose may begin or end a phase, or
    end the text.
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
        self,
        slot_ids: torch.Tensor,
        draft_tokens: torch.Tensor,
        top: torch.Tensor,
        relaxed: torch.Tensor,
        inside: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if inside is None:
            inside = self.thinking.before(slot_ids, draft_tokens)[:, :-1]
        protected = (draft_tokens.unsqueeze(-1) == self._protected).any(dim=-1)
        return torch.where(inside & ~protected, relaxed, torch.inf)

    def advance(self, slot_ids: torch.Tensor, tokens: torch.Tensor, num_emitted: torch.Tensor) -> None:
        self.thinking.advance(slot_ids, tokens, num_emitted)


class RoundPhase:
    """phase=round: reproduces TensorRT-LLM exactly.

    TensorRT-LLM keeps `delta` or 0 for each slot; here each slot has a bool. A round reads the bool once, so markers
    take effect in the next round. After the prompt the bool is true if the last chunk has a begin marker, whatever
    follows that marker; earlier chunks do not count. Outside thinking delta is 0, which is not strict: a token exactly
    as likely as the argmax can be accepted. Markers and EOS can be accepted by relaxation, like any token.
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
        self,
        slot_ids: torch.Tensor,
        draft_tokens: torch.Tensor,
        top: torch.Tensor,
        relaxed: torch.Tensor,
        inside: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return torch.where(self._relaxing.now(slot_ids).unsqueeze(1), relaxed, top)

    def advance(self, slot_ids: torch.Tensor, tokens: torch.Tensor, num_emitted: torch.Tensor) -> None:
        self.thinking.advance(slot_ids, tokens, num_emitted)
        self._relaxing.advance(slot_ids, tokens, num_emitted)
