"""A suffix tree beside a model's head: each round and request takes the one that is expected to be accepted further.

The tree expects its score, the head what it had accepted of late. The head catches up and drafts in every round, so
that its state never has a hole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from spec_lab.core.prompts import PromptPack
from spec_lab.core.protocols import Drafter
from spec_lab.core.types import DraftStep, Request, Sequence, VerifiedRound
from spec_lab.drafters.suffix import SuffixSizes, SuffixTexts

NEWEST = 0.2
"""The weight of the newest round in a running mean."""


@dataclass(slots=True)
class _Accepted:
    """Holds what a request's head had accepted: rounds looked at, and a running mean of those that it drafted for."""

    num_rounds: int
    mean: float


class HybridLookup:
    """Keeps the protocol `HostDrafter`: drafts where the tree expects more than the head had accepted."""

    def __init__(self, texts: SuffixTexts, names: tuple[str, str], head_drafts: int) -> None:
        """`names`: of the tree and of the head, as the record has them; `head_drafts`: of each round."""
        self.part_names: tuple[str, str] | None = names
        self.num_on_device = head_drafts
        self._texts = texts
        self.restart()

    def restart(self) -> None:
        self._texts.restart()
        self._accepted: dict[str, _Accepted] = {}
        self._usual = _Accepted(0, self.num_on_device / 2)  # of all requests: what a new one is expected to have

    def draft(self, sequences: Iterable[Sequence]) -> list[list[int] | None]:
        found = ((self._texts.look_up(sequence), self._expected(sequence)) for sequence in sequences)
        return [drafts.tokens if drafts.score > expected else None for drafts, expected in found]

    def finish(self, sequence: Sequence) -> None:
        self._texts.finish(sequence)
        self._accepted.pop(sequence.request.request_id, None)

    def _expected(self, sequence: Sequence) -> float:
        """Return how many drafts of the head the request is expected to accept."""
        assert self.part_names is not None
        own = self._accepted.setdefault(sequence.request.request_id, _Accepted(0, self._usual.mean))
        rounds = zip(sequence.accepted_per_round, sequence.drafted_by, strict=True)
        for accepted, drafted_by in list(rounds)[own.num_rounds :]:
            own.num_rounds += 1
            if drafted_by == self.part_names[1]:
                for known in (own, self._usual):
                    known.mean += NEWEST * (accepted - known.mean)
        return own.mean


class HybridDrafter:
    """Keeps the protocol `Drafter`: on the device the head's, whose loop ends with the drafts that it is to make."""

    def __init__(self, head: Drafter[Any], names: tuple[str, str], head_drafts: int, sizes: SuffixSizes) -> None:
        """`head`: has room for as many drafts as the tree may offer."""
        assert head.num_draft_tokens == sizes.limits.most
        self.head = head
        self.num_draft_tokens = head.num_draft_tokens
        self._texts = SuffixTexts(sizes)
        lookup = HybridLookup(self._texts, names, head_drafts)
        self.requirements = replace(head.requirements, on_host=lookup)

    def admit(self, slot: int, request: Request) -> None:
        self._texts.admit(slot, request)
        self.head.admit(slot, request)

    def ingest(self, pack: PromptPack) -> Any:
        return self.head.ingest(pack)

    def catch_up(self, verified: VerifiedRound) -> Any:
        return self.head.catch_up(verified)

    def step(self, state: Any, step: DraftStep) -> None:
        self.head.step(state, step)

    def kept_logits(self, slot_ids: torch.Tensor) -> torch.Tensor | None:
        return self.head.kept_logits(slot_ids)
