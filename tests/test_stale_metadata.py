"""graph.metadata=stale on the shipped head, and backends that cannot move metadata inside a graph."""

from __future__ import annotations

import pytest

from spec_lab.app.compose import compose
from spec_lab.checkpoints.packaged import ZOO
from spec_lab.core.results import GenerationResult
from spec_lab.measure.lab import MAIN, load_lab
from spec_lab.record.draft_counts import acceptance_length

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
