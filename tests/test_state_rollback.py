"""Rounds over targets with a state: drafts that are rejected leave nothing behind.

Every round's logits are compared with a forward of transformers over the text so far, without a cache, and between
rounds all states and inputs of convolutions that no round may read are spoilt.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.config.choices import Rollback
from spec_lab.config.run import RecurrentConfig
from spec_lab.core.types import AcceptanceInputs, Request, Sequence
from spec_lab.engine.engine import Engine
from tests import drawn_plan  # noqa: F401  registers a plan
from tests.covering import each_value
from tests.fake_target import PaddedGraph
from tests.kept_states import KEPT, spoil_unread
from tests.lab import make_config, make_engine, random_requests
from tests.scripted_rule import ScriptedAcceptance, random_script
from tests.tiny_hybrid import VOCAB, make_tiny_hybrid

# Of logits around 4; transformers in float32 was seen 1.3e-4 from itself in float64.
TOLERANCE = 5e-4
Script = Callable[[int], int]


@dataclass
class FreshForwards(ScriptedAcceptance):
    """A rule that compares each round's logits with a forward of `model` over the text and the drafts.

    Attributes:
        num_rounds: by request.
        widths: drafts of each round of a request.
    """

    model: Any = field(kw_only=True)
    num_rounds: dict[str, int] = field(default_factory=dict)
    widths: list[int] = field(default_factory=list)

    def check(self, sequence: Sequence, drafts: list[int], inputs: AcceptanceInputs, row: int) -> None:
        expected = self.model(torch.tensor([[*sequence.tokens, *drafts]])).logits[0, -len(drafts) - 1 :]
        torch.testing.assert_close(inputs.logits[row], expected, rtol=0, atol=TOLERANCE)
        name = sequence.request.request_id
        self.num_rounds[name] = self.num_rounds.get(name, 0) + 1
        self.widths.append(len(drafts))


def spoil_after_commits(engine: Engine) -> None:
    """Fill, behind every commit, what the committed row of each slot does not reach."""
    slots, commit = engine.parts.slots, engine.parts.slots.commit

    def commit_and_spoil(*arguments: Any) -> None:
        commit(*arguments)
        states: Any = slots.states
        for cache in engine.parts.cache.recurrent:
            for slot, row in enumerate(states.committed.tolist()):
                spoil_unread(cache, slot, row)

    slots.commit = commit_and_spoil  # type: ignore[method-assign]


Target = tuple[Path, Any, RecurrentConfig]
"""A checkpoint, transformers' model of it, and how its states are kept."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("hybrid")
    return folder, make_tiny_hybrid(folder)


@pytest.fixture(params=[Rollback.checkpoints, Rollback.replay])
def target(checkpoint: tuple[Path, Any], request: pytest.FixtureRequest) -> Target:
    return *checkpoint, RecurrentConfig(request.param)


def run(
    target: Target,
    requests: list[Request],
    num_draft_tokens: int,
    script: Script | None = None,
    padding: int = 1,
    **changes: Any,
) -> FreshForwards:
    """Generate with random drafts, of which `script` says how many are accepted."""
    folder, model, recurrent = target
    drafter = "random" if num_draft_tokens else "none"
    config = make_config((folder, folder), drafter, num_draft_tokens, recurrent=recurrent, **changes)
    engine = make_engine(config, requests)
    assert all(type(cache) is KEPT[recurrent.rollback] for cache in engine.parts.cache.recurrent)
    engine.graph = PaddedGraph(padding)
    rule = FreshForwards(engine, script or random_script(), model=model)
    engine.parts.rule = rule
    spoil_after_commits(engine)
    engine.generate(requests)
    assert len(rule.num_rounds) == len(requests), "each was compared"
    return rule


def requests_of(*sizes: tuple[int, int]) -> list[Request]:
    """Requests of so many prompt and new tokens."""
    requests = [
        replace(request, max_new_tokens=length, ignore_eos=True)
        for prompt, length in sizes
        for request in random_requests(1, length, seed=prompt, vocab_size=VOCAB, lengths=(prompt, prompt))
    ]
    return [replace(request, request_id=f"r{index}") for index, request in enumerate(requests)]


@pytest.mark.parametrize(("target", "num_draft_tokens"), each_value(Rollback, range(5)), indirect=["target"])
def test_any_number_of_drafts_is_taken_back(target: Target, num_draft_tokens: int) -> None:
    requests = requests_of((9, 22 * (num_draft_tokens + 2) // 2), (1, 18))
    rule = run(target, requests, num_draft_tokens, batch_size=2)
    assert max(rule.num_rounds.values()) >= 18 and set(rule.accepted) == set(range(num_draft_tokens + 1))


SCRIPTS: dict[str, Callable[[], Script]] = {
    "all": lambda: lambda num_drafts: num_drafts,
    "none": lambda: lambda num_drafts: 0,
    "in_turns": lambda: (lambda turns: lambda num_drafts: num_drafts * next(turns))(itertools.cycle((1, 0))),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_all_drafts_or_none(target: Target, script: str) -> None:
    run(target, requests_of((7, 24)), 3, SCRIPTS[script]())


@pytest.mark.parametrize("chunk", [1, 2])
def test_prompts_in_chunks_shorter_than_the_convolution_looks_back(target: Target, chunk: int) -> None:
    run(target, requests_of((9, 10), (2, 10)), 2, cache={"prefill_chunk": chunk}, batch_size=2)


def test_a_slot_is_used_again_and_rows_are_padded(target: Target) -> None:
    """A short request follows a long one in its slot; every batch is padded to four rows."""
    run(target, requests_of((30, 40), (1, 12), (2, 12), (5, 9)), 3, padding=4, batch_size=2)


def test_rounds_have_fewer_drafts_than_there_is_room_for(target: Target) -> None:
    """Rounds without drafts come behind rounds that accepted some."""
    rule = run(target, requests_of((6, 60), (3, 40)), 4, batch_size=2, options={"plan": "drawn"})
    assert set(rule.widths) == {0, 1, 2, 3, 4} and {(4, 0), (0, 4)} & set(itertools.pairwise(rule.widths))
