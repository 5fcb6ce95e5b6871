"""Helpers that compare the drafts of a running engine with a slow chain, in rounds that accept as many drafts as a
script says.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from spec_lab.acceptance.strict import StrictAcceptance
from spec_lab.core.results import RoundRecord
from spec_lab.core.types import AcceptanceInputs, Sequence, Verification
from spec_lab.drafters.picking import DraftedRows, DraftHead, GreedyPicker
from spec_lab.engine.engine import Engine
from tests.engine_state import poison
from tests.fake_target import PaddedGraph
from tests.lab import make_config, make_engine, random_requests

# Of logits around 10 in float32; 8 steps of a drafter that hands its output on unnormed were seen to differ by 1.3e-4.
TOLERANCE = 3e-4


class SlowChain(Protocol):
    """A drafter written down in a few lines, which recomputes everything for every draft."""

    def draft(self, text: list[int], num_draft_tokens: int) -> tuple[list[int], list[torch.Tensor]]:
        """Drafts after `text` in target ids, and the logits [vocab] of each, -inf outside the draft vocabulary."""
        ...


class RecordingPicker(GreedyPicker):
    """A greedy picker that keeps the logits of each slot's drafts."""

    takes_likeliest = False

    def __init__(self) -> None:
        self.logits: dict[int, list[torch.Tensor]] = {}

    def pick(
        self, head: DraftHead, hidden: torch.Tensor, rows: DraftedRows, column: torch.Tensor | None = None
    ) -> torch.Tensor:
        for slot, logits in zip(rows.slot_ids.tolist(), head.target_logits(hidden), strict=True):
            self.logits[slot] = [*self.logits.get(slot, [])[: 0 if column is None else int(column)], logits]
        return head.greedy(hidden)


def random_script() -> Callable[[int], int]:
    """A script in which every number of accepted drafts comes up."""
    generator = random.Random(1)
    return lambda num_draft_tokens: generator.randrange(num_draft_tokens + 1)


@dataclass
class ScriptedAcceptance(StrictAcceptance):
    """A rule that accepts `script(num_draft_tokens)` drafts whatever the target says; before that `check` sees every
    request.

    Attributes:
        script: asked once for each running request of a round, in the order of rows; padded rows take nothing of it.
        accepted: drafts accepted, by round and request.
        drafts: of each request, by round.
    """

    engine: Engine
    script: Callable[[int], int] = field(default_factory=random_script)
    accepted: list[int] = field(default_factory=list)
    drafts: dict[str, list[list[int]]] = field(default_factory=dict)

    def accept(self, inputs: AcceptanceInputs) -> Verification:
        draft_tokens, active = inputs.draft_tokens, inputs.active
        num_drafts = draft_tokens.shape[1]
        sequences = [s for s in self.engine.scheduler.running if not s.is_prefilling]
        for row, sequence in enumerate(sequences):
            drafts: list[int] = draft_tokens[row].tolist()
            self.drafts.setdefault(sequence.request.request_id, []).append(drafts)
            self.check(sequence, drafts, inputs, row)
        accepted = [self.script(num_drafts) for _ in sequences]
        self.accepted += accepted
        num_accepted = torch.tensor(accepted + [0] * (len(active) - len(sequences)))
        keep = torch.arange(num_drafts) < num_accepted.unsqueeze(1)
        tokens = inputs.logits.argmax(dim=-1)
        tokens[:, :-1] = torch.where(keep, draft_tokens, tokens[:, :-1])
        return Verification(tokens, torch.where(active, num_accepted + 1, 0))

    def check(self, sequence: Sequence, drafts: list[int], inputs: AcceptanceInputs, row: int) -> None:
        """Look at the `drafts` of one request, which stands at `row` of `inputs`."""
        raise NotImplementedError


@dataclass
class ScriptedRule(ScriptedAcceptance):
    """A rule that compares all drafts with the slow chain; `compared` counts those that were equal."""

    slow: SlowChain = field(kw_only=True)
    picker: RecordingPicker = field(default_factory=RecordingPicker)
    compared: int = 0
    rounds: list[RoundRecord] = field(default_factory=list)

    def check(self, sequence: Sequence, drafts: list[int], inputs: AcceptanceInputs, row: int) -> None:
        self._compare(sequence.tokens, drafts, self.picker.logits[sequence.slot])

    def _compare(self, text: list[int], drafts: list[int], logits: list[torch.Tensor]) -> None:
        expected, expected_logits = self.slow.draft(text, len(drafts))
        for ours, theirs, draft, token in zip(logits, expected_logits, drafts, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
            if draft != token:
                first, second = theirs.topk(2).values.tolist()
                assert first - second < 2 * TOLERANCE
                return
        self.compared += len(drafts)


def install(engine: Engine, slow: SlowChain, script: Callable[[int], int] | None = None) -> ScriptedRule:
    """Put the rule into an engine whose drafter has a picker."""
    rule = ScriptedRule(engine, script or random_script(), slow=slow)
    engine.parts.rule = rule
    engine.parts.drafter.picker = rule.picker  # type: ignore[attr-defined]
    return rule


def compare_drafts(
    slow: SlowChain,
    pair: tuple[Path, Path],
    drafter: str,
    num_draft_tokens: int = 3,
    prune: str = "none",
    *,
    num_requests: int = 4,
    max_new_tokens: int = 12,
    vocab_size: int = 160,
    bucket: int = 1,
    page_size: int = 4,
    batch_size: int = 3,
    **changes: Any,
) -> ScriptedRule:
    """Compare every draft with the slow chain's, with prompts of one token and of several chunks, page borders, padded
    rows, and slots that are used again; return the rule with what it saw. `changes` are those of `make_config`."""
    requests = random_requests(num_requests, max_new_tokens, 2, vocab_size, lengths=(1, 12))
    requests = [replace(request, ignore_eos=True) for request in requests]
    requests[0] = replace(requests[0], prompt_ids=(17,))
    cache = {"page_size": page_size, "prefill_chunk": 5}
    config = make_config(pair, drafter, num_draft_tokens, prune, batch_size=batch_size, cache=cache, **changes)
    engine = make_engine(config, requests)
    rule = install(engine, slow)
    engine.graph = PaddedGraph(bucket)
    poison(engine)
    rule.rounds = engine.generate(requests).rounds
    return rule
