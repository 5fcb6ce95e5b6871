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
from spec_lab.config.run import GraphConfig
from spec_lab.core.results import GenerationResult
from spec_lab.measure.lab import MAIN, load_lab
from spec_lab.options.graphs import FullLoop, RoundGraph, SplitSeed, StepReplay
from spec_lab.record.draft_counts import acceptance_length
from tests.lab import make_config, make_engine, make_pair, random_requests
from tests.tiny_checkpoints import refused

CHEAP = [
    "workload.limit=3",
    "kernels=torch",
    "max_new_tokens=48",
    "drafter.num_draft_tokens=4",
    "drafter.window=128",
    "references=[]",
]


def generate(*overrides: str) -> GenerationResult:
    config = compose([*CHEAP, "device=cpu", *overrides]).config
    lab = load_lab(config)
    return lab.engines[MAIN].generate(lab.requests)


@pytest.mark.skipif(not ZOO.is_dir(), reason="this checkout has no shipped weights")
def test_frozen_lengths_cost_acceptance_and_leave_the_output_right() -> None:
    """A window that stays where step 1 had it lacks what the draft itself wrote: the newest keys, which matter most.
    With graph=full_loop: `test_doctor_faults.py`."""
    fresh, stale = generate("graph=round"), generate("graph=round", "graph.metadata=stale")
    assert [record.output_ids for record in stale.requests] == [record.output_ids for record in fresh.requests]
    lengths = [acceptance_length(result.requests, result.num_draft_tokens) for result in (stale, fresh)]
    assert lengths[0] is not None and lengths[1] is not None and lengths[0] < lengths[1] - 0.1


class Fixed:
    """A backend whose `advance` cannot be captured."""

    supports_in_place_update = False

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


@pytest.mark.parametrize("graph", [SplitSeed(), FullLoop(), RoundGraph()])
def test_a_backend_that_cannot_move_inside_a_graph_is_refused_by_name(graph: GraphConfig, tmp_path: Path) -> None:
    requests = random_requests(1, 4)
    config = dataclasses.replace(make_config(make_pair(tmp_path), device="cpu"), graph=graph)
    chosen = config
    limits = engine_limits(chosen, requests, 3)
    models = load_models(chosen, limits.max_seq_len)
    models = dataclasses.replace(models, backend=Fixed(models.backend))
    with refused("attention=torch", f"graph={graph.name}", "graph=step_replay"):
        build_engine(chosen, models, limits)


def test_graph_step_replay_takes_any_backend(tmp_path: Path) -> None:
    requests = random_requests(1, 4)
    config = dataclasses.replace(make_config(make_pair(tmp_path), device="cpu"), graph=StepReplay())
    chosen = config
    limits = engine_limits(chosen, requests, 3)
    models = load_models(chosen, limits.max_seq_len)
    models = dataclasses.replace(models, backend=Fixed(models.backend))
    engine = build_engine(chosen, models, limits)
    expected = make_engine(config, requests).generate(requests)
    assert engine.generate(requests).requests[0].output_ids == expected.requests[0].output_ids
