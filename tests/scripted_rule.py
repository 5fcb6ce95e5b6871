"""Drafts of a running engine against a slow chain, in rounds that accept as many drafts as a script says."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from spec_lab.acceptance.strict import StrictAcceptance
from spec_lab.core.types import AcceptanceInputs, Verification
from spec_lab.drafters.picking import DraftedRows, DraftHead, GreedyPicker
from spec_lab.engine.engine import Engine
from tests.lab import NEAR_TIE


class SlowChain(Protocol):
    """A drafter written down in a few lines, which recomputes everything for every draft."""

    def draft(self, text: list[int], num_draft_tokens: int) -> tuple[list[int], list[torch.Tensor]]:
        """Drafts after `text` in target ids, and the logits [vocab] of each, -inf outside the draft vocabulary."""
        ...


class RecordingPicker(GreedyPicker):
    """Keeps the logits of each slot's drafts."""

    def __init__(self) -> None:
        self.logits: dict[int, list[torch.Tensor]] = {}

    def first(self, head: DraftHead, hidden: torch.Tensor, rows: DraftedRows) -> torch.Tensor:
        return self._keep(0, head, hidden, rows)

    def pick(self, head: DraftHead, hidden: torch.Tensor, rows: DraftedRows, column: torch.Tensor) -> torch.Tensor:
        return self._keep(int(column), head, hidden, rows)

    def _keep(self, column: int, head: DraftHead, hidden: torch.Tensor, rows: DraftedRows) -> torch.Tensor:
        for slot, logits in zip(rows.slot_ids.tolist(), head.target_logits(hidden), strict=True):
            self.logits[slot] = [*self.logits.get(slot, [])[:column], logits]
        return head.greedy(hidden)


@dataclass
class ScriptedRule(StrictAcceptance):
    """Accepts `script(num_draft_tokens)` drafts whatever the target says; compares all drafts with the slow chain.

    Attributes:
        compared: drafts that were equal.
        accepted: drafts accepted, by round and request.
        drafts: of each request, by round.
    """

    slow: SlowChain
    engine: Engine
    script: Callable[[int], int] | None = None
    picker: RecordingPicker = field(default_factory=RecordingPicker)
    compared: int = 0
    accepted: list[int] = field(default_factory=list)
    drafts: dict[str, list[list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.script = self.script or random_script()

    def accept(self, inputs: AcceptanceInputs) -> Verification:
        assert self.script is not None
        logits, draft_tokens, active = inputs.logits, inputs.draft_tokens, inputs.active
        num_drafts = draft_tokens.shape[1]
        sequences = [s for s in self.engine.scheduler.running if not s.is_prefilling]
        for sequence, drafts in zip(sequences, draft_tokens.tolist(), strict=False):
            self.drafts.setdefault(sequence.request.request_id, []).append(drafts)
            self._compare(sequence.tokens, drafts, self.picker.logits[sequence.slot])
        accepted = [self.script(num_drafts) for _ in range(len(active))]
        self.accepted += accepted[: len(sequences)]
        num_accepted = torch.tensor(accepted)
        keep = torch.arange(num_drafts) < num_accepted.unsqueeze(1)
        tokens = logits.argmax(dim=-1)
        tokens[:, :-1] = torch.where(keep, draft_tokens, tokens[:, :-1])
        return Verification(tokens, torch.where(active, num_accepted + 1, 0))

    def _compare(self, text: list[int], drafts: list[int], logits: list[torch.Tensor]) -> None:
        expected, expected_logits = self.slow.draft(text, len(drafts))
        for ours, theirs, draft, token in zip(logits, expected_logits, drafts, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
            if draft != token:
                first, second = theirs.topk(2).values.tolist()
                assert first - second < NEAR_TIE
                return
        self.compared += len(drafts)


def random_script() -> Callable[[int], int]:
    """Every number of accepted drafts comes up."""
    generator = random.Random(1)
    return lambda num_draft_tokens: generator.randrange(num_draft_tokens + 1)


def install(engine: Engine, slow: SlowChain, script: Callable[[int], int] | None = None) -> ScriptedRule:
    """Put the rule into an engine whose drafter has a picker."""
    rule = ScriptedRule(slow, engine, script)
    engine.parts.rule = rule
    engine.parts.drafter._picker = rule.picker  # type: ignore[attr-defined]
    return rule
