"""drafter=mtp_vanilla drafter.rows=window: TensorRT-LLM's K rows a module, their count and the holes they leave."""

from __future__ import annotations

from typing import Any

import pytest

from spec_lab.app.compose import compose
from spec_lab.core.kv_cache import cache_slots
from spec_lab.core.results import GenerationResult
from spec_lab.measure.lab import MAIN, load_lab

K = 3
CHEAP = ["device=cpu", "drafter=mtp_vanilla", f"drafter.num_draft_tokens={K}", "max_new_tokens=40", "references=[]"]


def decoded(*overrides: str) -> tuple[Any, GenerationResult]:
    lab = load_lab(compose([*CHEAP, *overrides]).config)
    engine = lab.engines[MAIN]
    for cache in engine.parts.drafter.caches:
        cache.kv.zero_()
    return engine, engine.generate(lab.requests)


@pytest.mark.parametrize("graph", ["eager", "round", "step_replay"])
def test_the_position_before_a_window_that_moved_by_k_plus_1_is_never_written(graph: str) -> None:
    """All drafts are accepted, so it is the first position of every round. With all rows no position is left out."""
    imposed = ["acceptance=synthetic", f"acceptance.mean_length={K + 1}", "workload.limit=1", f"graph={graph}"]
    for rows, per_round in (("window", [K] * K), ("text", [K + 1, K + 2, K + 3])):
        engine, result = decoded(*imposed, f"drafter.rows={rows}")
        (record,) = result.requests
        assert record.accepted_per_round == [K] * 10
        assert [round_record.rows.catchup_attention for round_record in result.rounds] == [sum(per_round)] * 10
        start = len(record.prompt_ids)
        pages = engine.parts.slots.table.pages[:1]
        for index, cache in enumerate(engine.parts.drafter.caches):
            slots = cache_slots(pages, pages.new_tensor([range(start + 10 * (K + 1))]), engine.parts.backend.page_size)
            unwritten = (cache.kv[slots[0]] == 0).flatten(1).all(dim=1).nonzero().flatten().tolist()
            # Module i holds pair r at position r - i, so that the last i positions of a prompt have no pair yet.
            holes = [start + number * (K + 1) for number in range(10)]
            assert unwritten == (holes if rows == "window" else []), (rows, index)
