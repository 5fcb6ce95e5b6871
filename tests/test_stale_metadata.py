"""graph.metadata=stale on the shipped head, and backends that cannot move metadata inside a graph."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from spec_lab.app.compose import compose
from spec_lab.build.engine import build_engine
from spec_lab.build.limits import engine_limits
from spec_lab.build.models import load_models
from spec_lab.checkpoints.packaged import ZOO
from spec_lab.core.results import GenerationResult
from spec_lab.measure.lab import MAIN, load_lab
from spec_lab.options.graphs import StepReplay
from spec_lab.record.draft_counts import acceptance_length
from tests.lab import make_config, make_engine, make_pair, random_requests

needs_weights = pytest.mark.skipif(not ZOO.is_dir(), reason="this checkout has no shipped weights")
CHEAP = [
    "workload.limit=3",
    "kernels=torch",
    "max_new_tokens=48",
    "references=[]",
]


def generate(*overrides: str) -> GenerationResult:
    config = compose([*CHEAP, "device=cpu", *overrides]).config
    lab = load_lab(config)
    return lab.engines[MAIN].generate(lab.requests)


def drafted(*overrides: str) -> tuple[list[list[int]], list[list[int]], float]:
    """Outputs, accepted drafts by round, and the acceptance length."""
    result = generate(*overrides)
    length = acceptance_length(result.requests, result.num_draft_tokens)
    assert length is not None
    accepted = [record.accepted_per_round for record in result.requests]
    return [record.output_ids for record in result.requests], accepted, length


@needs_weights
@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_frozen_windows_cost_acceptance_and_leave_the_output_right(kernels: str) -> None:
    """A window that stays where step 1 had it lacks what the draft itself wrote: the newest keys, which matter most.
    The native layers have one length, so that theirs are run in parts."""
    common = (f"kernels={kernels}", "drafter.window=128", "drafter.num_draft_tokens=4")
    fresh, stale = drafted("graph=round", *common), drafted("graph=round", "graph.metadata=stale", *common)
    assert stale[0] == fresh[0]
    assert stale[2] < fresh[2] - 0.05
    for graph in ("full_loop", "split_seed"):
        assert drafted(f"graph={graph}", "graph.metadata=stale", *common) == stale


@needs_weights
@pytest.mark.parametrize("unaffected", [["drafter.num_draft_tokens=4"], ["drafter.window=8"]])
def test_without_a_window_or_a_third_draft_nothing_changes(unaffected: list[str]) -> None:
    """vLLM's loop updated positions, slots and lengths, and its metadata was made for step 1, which drafts token 2."""
    common = ["graph=full_loop", "drafter.num_draft_tokens=2", *unaffected]
    assert drafted(*common, "graph.metadata=stale") == drafted(*common)


class Fixed:
    """A backend whose `advance` cannot be captured."""

    supports_in_place_update = False

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def test_graph_step_replay_takes_any_backend(tmp_path: Path) -> None:
    requests = random_requests(1, 4)
    config = dataclasses.replace(make_config(make_pair(tmp_path), device="cpu"), graph=StepReplay())
    chosen = config
    limits = engine_limits(chosen, requests)
    models = load_models(chosen, limits.max_seq_len)
    models = dataclasses.replace(models, backend=Fixed(models.backend))
    engine = build_engine(chosen, models, limits)
    expected = make_engine(config, requests).generate(requests)
    assert engine.generate(requests).requests[0].output_ids == expected.requests[0].output_ids
