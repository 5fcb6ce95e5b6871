"""Different experts read a round: counted on the device, in every graph mode, without padded rows; recorded, shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.config.option import get
from spec_lab.core.results import ExpertCounts
from spec_lab.engine.engine import Engine
from spec_lab.engine.experts_read import ExpertsRead, ReadingStage, count_distinct
from spec_lab.engine.tape import TapeRecorder
from tests.lab import make_config, make_engine, random_requests
from tests.tiny_experts import make_tiny_nextn
from tests.tiny_gemma4 import make_tiny_gemma4
from tests.tiny_hybrid import make_tiny_hybrid

NUM_LAYERS, NUM_CHOSEN, NUM_EXPERTS = 3, 3, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nextn")
    make_tiny_nextn(path)
    return path


def random_choices(layers: int, rows: int, num_experts: int, num_chosen: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(layers + rows)
    return torch.rand(layers, rows, num_experts, generator=generator).topk(num_chosen).indices


@pytest.mark.parametrize("num_active", [0, 1, 5, 12])
def test_counting_leaves_rows_out(num_active: int) -> None:
    choices = random_choices(3, 12, 16, 2)
    expected = sum(len(set(layer[:num_active].flatten().tolist())) for layer in choices)
    assert int(count_distinct(choices, 16, torch.arange(12) < num_active)) == expected


def test_rows_of_padded_requests_are_left_out_and_a_graph_counts_anew() -> None:
    """Stages run 1, N or more rows a request; verify's graph leaves what a later one of another size reads."""
    counter = ExpertsRead(torch.device("cpu"))
    saw = counter.watch(16, 10)
    active = torch.tensor([True, True, False, False])
    choices = {rows: random_choices(1, 4 * rows, 16, 2)[0] for rows in (1, 3)}

    def run_round() -> None:
        counter.begin_round(active)
        for stage, rows in ((ReadingStage.VERIFY, 3), (ReadingStage.CATCHUP, 1)):
            with counter.stage(stage):
                for _ in range(2):
                    saw(choices[rows])
        saw(choices[1])  # outside a stage, as in a prompt pass

    graph = TapeRecorder().capture(run_round)
    counter.restart()
    with torch.inference_mode():
        for num_active in (2, 4, 1):
            active.copy_(torch.arange(4) < num_active)
            graph.replay()
    expected = {
        rows: sum(2 * len(set(choices[rows][: rows * n].flatten().tolist())) for n in (2, 4, 1)) for rows in (1, 3)
    }
    assert counter.read() == ExpertCounts(verify=expected[3], catchup=expected[1], recur=0)
    assert counter.read_bytes() == ExpertCounts(10 * expected[3], 10 * expected[1], 0)


def counts_of(engine: Engine) -> tuple[ExpertCounts, int]:
    result = engine.generate(random_requests(4, max_new_tokens=6))
    assert result.experts_read is not None
    return result.experts_read, len(result.rounds)


def nextn_config(folder: Path, drafter: str = "mtp_eagle", prune: str = "catchup", batch_size: int = 1) -> Any:
    return make_config((folder, folder), drafter, prune=prune, batch_size=batch_size)


def test_one_request_reads_what_its_rows_choose(folder: Path) -> None:
    """Plain decoding reads the experts of one row, a pruned catch-up too, and each of the two further steps."""
    requests = random_requests(4)
    engine = make_engine(nextn_config(folder, "none"), requests)
    plain, rounds = counts_of(engine)
    assert plain == ExpertCounts(rounds * NUM_LAYERS * NUM_CHOSEN, 0, 0)
    config = engine.parts.target.config
    (inner,) = {plan.experts.intermediate_size for plan in config.layers if plan.experts}
    expert_bytes = 3 * inner * config.hidden_size * 4
    assert engine.parts.experts_read.read_bytes() == ExpertCounts(plain.verify * expert_bytes, 0, 0)
    assert counts_of(engine) == (plain, rounds), "every pass counts for itself"
    pruned, rounds = counts_of(make_engine(nextn_config(folder), requests))
    assert (pruned.catchup, pruned.recur) == (rounds * NUM_CHOSEN, rounds * 2 * NUM_CHOSEN)
    assert rounds * NUM_LAYERS * NUM_CHOSEN < pruned.verify <= rounds * NUM_LAYERS * NUM_EXPERTS
    unpruned, rounds = counts_of(make_engine(nextn_config(folder, prune="none"), requests))
    assert rounds * NUM_CHOSEN < unpruned.catchup <= rounds * NUM_EXPERTS
    assert unpruned.recur == pruned.recur


def test_what_a_plan_times_is_not_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spec_lab.engine.measured_costs.SECONDS", 0.0)
    requests, options = random_requests(1, max_new_tokens=1), {"plan": "cost"}
    result = make_engine(make_config((folder, folder), "mtp_eagle", options=options), requests).generate(requests)
    assert not result.rounds and result.experts_read == ExpertCounts(0, 0, 0)


@pytest.fixture(scope="module")
def eager_counts(folder: Path) -> ExpertCounts:
    return counts_of(make_engine(nextn_config(folder, batch_size=4), random_requests(4)))[0]


@pytest.mark.parametrize("graph", ["split_seed", "step_replay", "full_loop", "round"])
def test_every_graph_mode_counts_alike(folder: Path, eager_counts: ExpertCounts, graph: str) -> None:
    """Three of four requests run padded to four for a while."""
    config = replace(nextn_config(folder, batch_size=4), graph=get("graph", graph)())
    assert counts_of(make_engine(config, random_requests(4)))[0] == eager_counts


@pytest.mark.parametrize(("kind", "read"), [("26b", 6 * 2), ("qwen3_5_moe", 4 * 2)])
def test_experts_of_other_families_are_counted(tmp_path: Path, kind: str, read: int) -> None:
    """Gemma's stand beside a dense MLP, Qwen's behind layers with a state too."""
    make_tiny: Any = make_tiny_gemma4 if kind == "26b" else make_tiny_hybrid
    make_tiny(tmp_path, kind)
    requests = random_requests(2, max_new_tokens=4, vocab_size=40)
    engine = make_engine(make_config((tmp_path, tmp_path), "none", prune="prefill"), requests)
    result = engine.generate(requests)
    assert result.experts_read == ExpertCounts(read * len(result.rounds), 0, 0)
