"""Graph modes on the CPU recorder: the same drafts, tokens and KV as eager, on scratch rows and nothing else."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.config import (
    FullLoopGraphConfig,
    GraphConfig,
    RoundGraphConfig,
    SplitSeedGraphConfig,
    StepReplayGraphConfig,
)
from spec_lab.core.trees import map_tensors
from spec_lab.core.types import GenerationResult, Request
from spec_lab.engine.engine import Engine
from spec_lab.engine.kv_cache import SCRATCH_PAGE
from spec_lab.engine.readback import RoundResult, read_later
from tests.lab import make_config, make_engine, make_pair, random_requests

MODES: dict[str, GraphConfig] = {
    "split_seed": SplitSeedGraphConfig(),
    "step_replay": StepReplayGraphConfig(),
    "full_loop": FullLoopGraphConfig(),
    "round": RoundGraphConfig(),
    "overlap": RoundGraphConfig(overlap=True),
    "verify_eager": FullLoopGraphConfig(verify=False),
}
PAGE_SIZE = 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"))


def engine_of(
    pair: tuple[Path, Path], requests: list[Request], graph: GraphConfig | None, *arguments: Any, **options: Any
) -> Engine:
    config = make_config(pair, *arguments, cache={"page_size": PAGE_SIZE}, **options)
    return make_engine(config if graph is None else dataclasses.replace(config, graph=graph), requests)


def outcome(result: GenerationResult) -> dict[str, tuple[list[int], list[int]]]:
    """Tokens and accepted drafts of each round: what the drafts were shows in the second."""
    return {record.request_id: (record.output_ids, record.accepted_per_round) for record in result.requests}


def live_kv(engine: Engine) -> torch.Tensor:
    """The target's cache behind the scratch page."""
    return engine.parts.cache.kv[:, (SCRATCH_PAGE + 1) * PAGE_SIZE :]


@pytest.mark.parametrize("prune", ["none", "catchup"])
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_a_captured_mode_gives_what_eager_gives(
    pair: tuple[Path, Path], mode: str, num_draft_tokens: int, prune: str
) -> None:
    """Batches of 3 in buckets of 4, slots reused, prompts of one token up, page borders crossed, lengths to the limit."""
    requests = random_requests(5, 14, lengths=(1, 12))
    options = ("eagle3", num_draft_tokens, prune)
    eager = engine_of(pair, requests, None, *options, batch_size=3)
    captured = engine_of(pair, requests, MODES[mode], *options, batch_size=3)
    expected, result = eager.generate(requests), captured.generate(requests)
    assert outcome(result) == outcome(expected)
    assert result.graph.captures > 0 and result.graph.replays > result.graph.captures and result.graph.fallbacks == 0
    if mode != "overlap":  # surplus rounds write on
        torch.testing.assert_close(live_kv(captured), live_kv(eager), rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_plain_decoding_is_captured_alike(pair: tuple[Path, Path], mode: str) -> None:
    requests = random_requests(3, 10)
    expected = engine_of(pair, requests, None, "none", batch_size=2).generate(requests)
    result = engine_of(pair, requests, MODES[mode], "none", batch_size=2).generate(requests)
    assert outcome(result) == outcome(expected)
    names = {"round"} if mode in ("round", "overlap") else set() if mode == "verify_eager" else {"verify"}
    assert set(result.graph.nodes) == names


def device_state(engine: Engine) -> list[torch.Tensor]:
    """Copies of every per-slot and cache tensor, scratch rows and the scratch page left out."""
    parts = engine.parts
    scratch = slice((SCRATCH_PAGE + 1) * PAGE_SIZE, None)
    kv = [parts.cache.kv[:, scratch], parts.drafter._cache.kv[scratch]]
    slots = [parts.slots.kv_lens[:-1], parts.slots.input_ids[:-1], parts.slots.table.pages]
    return map_tensors([*kv, *slots], torch.Tensor.clone)


@pytest.mark.parametrize("mode", MODES)
def test_capture_touches_scratch_only(pair: tuple[Path, Path], mode: str) -> None:
    """In the middle of a run, with live requests in the slots."""
    requests = random_requests(3, 12)
    engine = engine_of(pair, requests, MODES[mode], "eagle3", 3, "catchup", batch_size=3)
    graph: Any = engine.graph
    prepare, compared = graph.prepare, []

    def prepare_and_compare(decode_round: Any, num_requests: int) -> None:
        captures = engine.graph.counts.captures
        before = device_state(engine)
        prepare(decode_round, num_requests)
        if engine.graph.counts.captures > captures:
            compared.append(engine.parts.slots.kv_lens.amax().item())
            for old, new in zip(before, device_state(engine), strict=True):
                assert torch.equal(old, new)

    graph.prepare = prepare_and_compare
    engine.generate(requests)
    assert len(compared) >= 1 and max(compared) > 0


def test_a_surplus_round_emits_nothing_and_frees_late(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With overlap a finished sequence is in one more round; slot and pages come back only after that one is read."""
    requests = random_requests(4, 9)
    expected = engine_of(pair, requests, None, "eagle3", 3, batch_size=2).generate(requests)
    engine = engine_of(pair, requests, MODES["overlap"], "eagle3", 3, batch_size=2)
    scheduler: Any = engine.scheduler
    release, graph_run = scheduler.release, engine.graph.run
    launched: list[list[int]] = []
    num_read = 0

    def run(decode_round: Any, slots: list[int], max_kv_len: int) -> Any:
        launched.append(slots)
        return graph_run(decode_round, slots, max_kv_len)

    class Counted:
        def __init__(self, verification: Any) -> None:
            self.result = read_later(verification)

        def read(self) -> RoundResult:
            nonlocal num_read
            num_read += 1
            return self.result.read()

    def on_release(sequence: Any) -> None:
        assert all(sequence.slot not in slots for slots in launched[num_read:])
        release(sequence)

    monkeypatch.setattr("spec_lab.engine.engine.read_later", Counted)
    engine.graph.run, scheduler.release = run, on_release  # type: ignore[method-assign]
    result = engine.generate(requests)
    assert outcome(result) == outcome(expected)
    num_surplus = sum(map(len, launched)) - sum(len(record.request_ids) for record in result.rounds)
    assert num_surplus == len(requests) and num_read == len(launched)
    assert scheduler._allocator.num_free == scheduler._allocator.num_total


def test_an_engine_goes_on_after_a_run(pair: tuple[Path, Path]) -> None:
    """Three passes over other requests on the same graphs."""
    engine = engine_of(pair, random_requests(3, 12), MODES["full_loop"], "eagle3", 3, batch_size=2)
    for seed in range(3):
        requests = random_requests(3, 12, seed=seed, lengths=(1, 30))
        expected = engine_of(pair, requests, None, "eagle3", 3, batch_size=2).generate(requests)
        assert outcome(engine.generate(requests)) == outcome(expected)
    assert engine.graph.counts.captures == 4  # verify and draft, for one and for two requests
