"""acceptance=replay: accepts what a recorded run accepted, at any target and any number of offered drafts.

A run of positions ends with a draft that a recorded round rejected: a drafter that begins at any of them predicts the
rest of the run, and no more. So a round that begins at a position accepts as many drafts as are left of the run that
the position lies in, at most those it offers, and the next round begins behind them. A round that accepted all its
drafts ended for want of drafts. So the next one goes on with its run, and the token between them counts as predicted,
since nobody knows. Where that was often, a smaller K is flattered, so the recording should have the largest K. A round
that the end of a text cut is known up to there alone, so its run goes on too. The output is no model's text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from zlib import crc32

import torch

from spec_lab.acceptance.confidences import DraftConfidences
from spec_lab.acceptance.distribution import at_tokens
from spec_lab.acceptance.emit import append
from spec_lab.core.protocols import RuleTraits
from spec_lab.core.types import AcceptanceInputs, Request, Verification


@dataclass(frozen=True, slots=True)
class RecordedRound:
    """A round of a recorded request.

    Attributes:
        num_tokens: how many of its tokens are in the text, before a limit.
        goes_on: it rejected no draft before the text ended, so nobody knows whether the next token was predicted.
        survival: the drafter's, of each draft; empty if it was not kept.
    """

    num_tokens: int
    goes_on: bool
    survival: Sequence[float] = ()


def runs_of(rounds: Sequence[RecordedRound], num_draft_tokens: int) -> tuple[list[int], list[list[float]]]:
    """Return for each position of a request's output, after its first token, how many drafts are accepted there, and
    the survival of `num_draft_tokens` drafts there. A draft past the recorded ones is as sure as the last of them."""
    left, survival = [], []
    length, ahead = 0, list[float]()  # the run from the round that comes next, and how sure each of its drafts is
    for each in reversed([*rounds, *rounds]):  # the first round comes behind the last
        before = (1.0, *each.survival[:-1])
        own = [now / max(last, 1e-9) for now, last in zip(each.survival, before, strict=False)]
        if each.goes_on:
            length, ahead = each.num_tokens + length, [*own, *own[-1:]][: each.num_tokens] + ahead
        else:
            length, ahead = each.num_tokens - 1, own
        del ahead[each.num_tokens + num_draft_tokens :]
        for offset in reversed(range(each.num_tokens)):
            left.append(length - offset)
            sure = ahead[offset : offset + num_draft_tokens] or own[-1:] or [0.0]
            sure += sure[-1:] * (num_draft_tokens - len(sure))
            survival.append(list(accumulate(sure, mul)))
    once = len(left) // 2
    return left[::-1][:once], survival[::-1][:once]


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
        num_draft_tokens: int,
        device: torch.device,
        confidences: DraftConfidences | None = None,
    ) -> None:
        """`confidences`: where the recorded ones replace the drafter's."""
        runs = {name: runs_of(rounds, num_draft_tokens) for name, rounds in recorded.items() if rounds}
        self._runs = {name: (torch.tensor(left), torch.tensor(sure)) for name, (left, sure) in runs.items()}
        self._names = sorted(self._runs)
        self._starts = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        longest = max(len(left) for left, _ in self._runs.values())
        self._lengths = torch.ones_like(self._starts)
        self._left = torch.zeros((num_slots + 1, longest), dtype=torch.int64, device=device)
        self._survival = torch.zeros((num_slots + 1, longest, num_draft_tokens), device=device)
        self._confidences = confidences
        if confidences is not None:
            confidences.is_replayed = True

    def admit(self, slot: int, request: Request) -> None:
        name = request.request_id
        if name not in self._runs:
            name = self._names[crc32(name.encode()) % len(self._names)]
        left, survival = self._runs[name]
        self._lengths[slot] = len(left)
        self._left[slot, : len(left)] = left
        self._survival[slot, : len(left)] = survival
        self._starts[slot] = len(request.prompt_ids)
        if self._confidences is not None:
            self._confidences.survival[slot] = self._survival[slot, 0]

    def first_tokens(self, logits: torch.Tensor, slot_ids: torch.Tensor, kv_lens: torch.Tensor) -> torch.Tensor:
        return logits.argmax(dim=-1)

    def accept(self, inputs: AcceptanceInputs) -> Verification:
        slot_ids, most = inputs.slot_ids, inputs.draft_tokens.shape[1]
        lengths = self._lengths.index_select(0, slot_ids)
        places = inputs.kv_lens - self._starts.index_select(0, slot_ids)
        accepted = self._left[slot_ids, places % lengths].clamp(max=most)
        if inputs.num_drafts is not None:
            accepted = torch.minimum(accepted, inputs.num_drafts)
        tokens = append(inputs.draft_tokens, accepted, at_tokens(inputs.logits.argmax(dim=-1), accepted))
        num_emitted = torch.where(inputs.active, accepted + 1, 0)
        if self._confidences is not None:
            ends = (places + num_emitted) % lengths
            self._confidences.survival.index_copy_(0, slot_ids, self._survival[slot_ids, ends])
        return Verification(tokens, num_emitted)
