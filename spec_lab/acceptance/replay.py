"""acceptance=replay: accepts what a recorded run accepted, at any target and any number of offered drafts.

A recorded round of n tokens is a run of positions: a drafter that begins at any of them predicts the rest of the run,
and no more. So a round that begins at a position accepts as many drafts as are left of the run that the position lies
in, at most those it offers, and the next round begins behind them. A run's length is known only up to the K that was
recorded, so the recording should have the largest K. The output is no model's text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch

from spec_lab.acceptance.confidences import DraftConfidences
from spec_lab.acceptance.distribution import at_tokens
from spec_lab.acceptance.emit import append
from spec_lab.core.protocols import RuleTraits
from spec_lab.core.types import AcceptanceInputs, Request, Verification


@dataclass(frozen=True, slots=True)
class RecordedRound:
    """How many drafts a round accepted, and the drafter's survival of each draft; empty if it was not kept."""

    accepted: int
    survival: Sequence[float] = ()


def runs_of(rounds: Sequence[RecordedRound], num_draft_tokens: int) -> tuple[list[int], list[list[float]]]:
    """Return for each position of a request's output, after its first token, how many drafts are accepted there, and
    the survival of `num_draft_tokens` drafts there. A draft past the recorded ones is as sure as the last of them."""
    left, survival = [], []
    for each in rounds:
        before = (1.0, *each.survival[:-1])
        own = [now / max(last, 1e-9) for now, last in zip(each.survival, before, strict=False)]
        for offset in range(each.accepted + 1):
            left.append(each.accepted - offset)
            ahead = own[offset:] or own[-1:] or [0.0]
            row = [1.0]
            for index in range(num_draft_tokens):
                row.append(row[-1] * ahead[min(index, len(ahead) - 1)])
            survival.append(row[1:])
    return left, survival


class ReplayAcceptance:
    """Accepts as recorded, then emits the target's argmax of the row reached.

    A request replays the recorded request of its id, or else one that its id chooses; one that is too short begins
    anew.
    """

    traits = RuleTraits(lossless=False, imposed=True)

    def __init__(
        self,
        recorded: Mapping[str, Sequence[RecordedRound]],
        num_slots: int,
        max_tokens: int,
        num_draft_tokens: int,
        device: torch.device,
        confidences: DraftConfidences | None = None,
    ) -> None:
        """`max_tokens`: the longest output; `confidences`: where the recorded ones replace the drafter's."""
        runs = {name: runs_of(rounds, num_draft_tokens) for name, rounds in recorded.items() if rounds}
        self._runs = {name: (torch.tensor(left), torch.tensor(sure)) for name, (left, sure) in runs.items()}
        self._names = sorted(self._runs)
        self._starts = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._left = torch.zeros((num_slots + 1, max_tokens), dtype=torch.int64, device=device)
        self._survival = torch.zeros((num_slots + 1, max_tokens, num_draft_tokens), device=device)
        self._confidences = confidences
        if confidences is not None:
            confidences.is_replayed = True

    def admit(self, slot: int, request: Request) -> None:
        name = request.request_id
        if name not in self._runs:
            name = self._names[crc32(name.encode()) % len(self._names)]
        left, survival = self._runs[name]
        places = torch.arange(self._left.shape[1]) % len(left)
        self._left[slot] = left[places]
        self._survival[slot] = survival[places]
        self._starts[slot] = len(request.prompt_ids)
        if self._confidences is not None:
            self._confidences.survival[slot] = self._survival[slot, 0]

    def first_tokens(self, logits: torch.Tensor, slot_ids: torch.Tensor, kv_lens: torch.Tensor) -> torch.Tensor:
        return logits.argmax(dim=-1)

    def accept(self, inputs: AcceptanceInputs) -> Verification:
        slot_ids, most = inputs.slot_ids, inputs.draft_tokens.shape[1]
        places = inputs.kv_lens - self._starts.index_select(0, slot_ids)
        accepted = self._left[slot_ids, places.clamp(0, self._left.shape[1] - 1)].clamp(max=most)
        if inputs.num_drafts is not None:
            accepted = torch.minimum(accepted, inputs.num_drafts)
        tokens = append(inputs.draft_tokens, accepted, at_tokens(inputs.logits.argmax(dim=-1), accepted))
        num_emitted = torch.where(inputs.active, accepted + 1, 0)
        if self._confidences is not None:
            ends = (places + num_emitted).clamp(0, self._left.shape[1] - 1)
            self._confidences.survival.index_copy_(0, slot_ids, self._survival[slot_ids, ends])
        return Verification(tokens, num_emitted)
