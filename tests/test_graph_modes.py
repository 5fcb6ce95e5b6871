"""Graph modes on the CPU recorder: the same drafts, tokens and KV as eager, on scratch rows and nothing else."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.config import (
    AttentionConfig,
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
from spec_lab.models.config import read_model_config
from tests.lab import make_config, make_engine, make_pair, random_requests
from tests.tiny_assistant import make_tiny_assistant
from tests.tiny_mtp import make_tiny_mtp

MODES: dict[str, GraphConfig] = {
    "split_seed": SplitSeedGraphConfig(),
    "step_replay": StepReplayGraphConfig(),
    "full_loop": FullLoopGraphConfig(),
    "round": RoundGraphConfig(),
    "overlap": RoundGraphConfig(overlap=True),
    "verify_eager": FullLoopGraphConfig(verify=False),
}
PAGE_SIZE = 4


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DRAFTERS = {"mtp_eagle": 2, "mtp_vanilla": 3, "frozen_kv": 3, "draft_model": 2}
"""Beside eagle3, with the number of draft tokens they are tried with."""


@pytest.fixture(scope="module", params=DEVICES)
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    target, head = make_pair(tmp_path_factory.mktemp("pair"))
    config = read_model_config(target)
    folders = {name: tmp_path_factory.mktemp(name) for name in DRAFTERS} | {"eagle3": head, "none": head}
    make_tiny_mtp(folders["mtp_eagle"], "ours", config)
    make_tiny_mtp(folders["mtp_vanilla"], "ours", config, num_modules=3)
    make_tiny_assistant(folders["frozen_kv"], config)
    folders["draft_model"] = target
    return Lab(target, folders, request.param)


@dataclass(frozen=True)
class Lab:
    """A tiny target and weights for every drafter, on a device, in float32."""

    target: Path
    folders: dict[str, Path]
    device: str

    def engine(
        self,
        requests: list[Request],
        graph: GraphConfig | None,
        drafter: str = "eagle3",
        num_draft_tokens: int = 3,
        prune: str = "catchup",
        attention: str = "torch",
        **options: Any,
    ) -> Engine:
        """`graph` None is eager."""
        config = make_config(
            (self.target, self.folders[drafter]),
            drafter,
            num_draft_tokens,
            prune,
            cache={"page_size": PAGE_SIZE},
            device=self.device,
            dtype="float32",
            **options,
        )
        config = dataclasses.replace(config, attention=AttentionConfig(name=attention))
        return make_engine(config if graph is None else dataclasses.replace(config, graph=graph), requests)


def outcome(result: GenerationResult) -> dict[str, tuple[list[int], list[int]]]:
    """Tokens and accepted drafts of each round: what the drafts were shows in the second."""
    return {record.request_id: (record.output_ids, record.accepted_per_round) for record in result.requests}


def live_kv(engine: Engine) -> torch.Tensor:
    """The target's cache behind the scratch page."""
    return engine.parts.cache.kv[:, (SCRATCH_PAGE + 1) * PAGE_SIZE :]


def assert_equal_to_eager(lab: Lab, mode: str, requests: list[Request], **options: Any) -> GenerationResult:
    eager, captured = lab.engine(requests, None, **options), lab.engine(requests, MODES[mode], **options)
    expected, result = eager.generate(requests), captured.generate(requests)
    assert outcome(result) == outcome(expected)
    if mode != "overlap":  # surplus rounds write on
        torch.testing.assert_close(live_kv(captured), live_kv(eager), rtol=0, atol=1e-4)
    assert result.graph.fallbacks == 0
    return result


CASES = [(mode, count, prune) for mode in MODES for count, prune in ((1, "catchup"), (3, "none"), (3, "catchup"))]


@pytest.mark.parametrize(("mode", "num_draft_tokens", "prune"), [*CASES, ("full_loop", 8, "catchup")])
def test_a_captured_mode_gives_what_eager_gives(lab: Lab, mode: str, num_draft_tokens: int, prune: str) -> None:
    """Batches of 3 in buckets of 4, slots reused, prompts of one token, page borders, the maximum length."""
    requests = random_requests(5, 12, lengths=(1, 12))
    options = {"num_draft_tokens": num_draft_tokens, "prune": prune, "batch_size": 3}
    result = assert_equal_to_eager(lab, mode, requests, **options)
    assert result.graph.captures > 0 and result.graph.replays > result.graph.captures


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("mode", ["split_seed", "step_replay", "full_loop", "round"])
def test_every_drafter_can_be_captured(lab: Lab, mode: str, drafter: str) -> None:
    requests = random_requests(3, 9, lengths=(1, 9))
    count = DRAFTERS[drafter]
    result = assert_equal_to_eager(lab, mode, requests, drafter=drafter, num_draft_tokens=count, batch_size=2)
    steps = {f"step_{index}" for index in range(1, count)} if drafter == "mtp_vanilla" else {"step_1"}
    names = {
        "split_seed": {"verify", "recur"},
        "step_replay": {"verify", "seed", *steps},
        "full_loop": {"verify", "draft"},
        "round": {"round"},
    }
    assert set(result.graph.nodes) == names[mode]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_captured_triton_attention_gives_what_eager_gives(lab: Lab, mode: str) -> None:
    requests = random_requests(5, 20, lengths=(1, 30))
    if lab.device == "cuda":
        assert_equal_to_eager(lab, mode, requests, attention="triton", batch_size=3)


@pytest.mark.parametrize("mode", MODES)
def test_plain_decoding_is_captured_alike(lab: Lab, mode: str) -> None:
    requests = random_requests(3, 10)
    result = assert_equal_to_eager(lab, mode, requests, drafter="none", batch_size=2)
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
def test_capture_touches_scratch_only(lab: Lab, mode: str) -> None:
    """In the middle of a run, with live requests in the slots."""
    requests = random_requests(3, 12)
    engine = lab.engine(requests, MODES[mode], batch_size=3)
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


def test_a_surplus_round_emits_nothing_and_frees_late(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """With overlap a finished sequence is in one more round; slot and pages come back only after that one is read."""
    requests = random_requests(4, 9)
    expected = lab.engine(requests, None, batch_size=2).generate(requests)
    engine = lab.engine(requests, MODES["overlap"], batch_size=2)
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


def test_an_engine_goes_on_after_a_run(lab: Lab) -> None:
    """Three passes over other requests on the same graphs."""
    engine = lab.engine(random_requests(3, 12), MODES["full_loop"], batch_size=2)
    for seed in range(3):
        requests = random_requests(3, 12, seed=seed, lengths=(1, 30))
        expected = lab.engine(requests, None, batch_size=2).generate(requests)
        assert outcome(engine.generate(requests)) == outcome(expected)
    assert engine.graph.counts.captures == 4  # verify and draft, for one and for two requests


@pytest.mark.parametrize("graph", [FullLoopGraphConfig(metadata="stale"), RoundGraphConfig(metadata="stale")])
def test_stale_metadata_changes_drafts_and_not_the_output(lab: Lab, graph: GraphConfig) -> None:
    """With all lengths frozen at step 1 a later step does not see the keys the draft itself wrote."""
    requests = random_requests(4, 24, lengths=(8, 16))
    options: dict[str, Any] = {"num_draft_tokens": 4, "batch_size": 2, "options": {"window": 4}}
    fresh = lab.engine(requests, dataclasses.replace(graph, metadata="in_place"), **options)
    stale = lab.engine(requests, graph, **options)
    seen: list[list[torch.Tensor]] = [[], []]
    results = []
    for engine, drafts in zip((fresh, stale), seen, strict=True):
        commit: Any = engine.graph.run

        def keep(*arguments: Any, run: Any = commit, engine: Engine = engine, drafts: Any = drafts) -> Any:
            result = run(*arguments)
            drafts.append(engine.parts.slots.input_ids[:-1, 1:].clone())
            return result

        engine.graph.run = keep  # type: ignore[method-assign]
        results.append(engine.generate(requests))
    outputs = [{record.request_id: record.output_ids for record in result.requests} for result in results]
    assert outputs[0] == outputs[1]
    first, second = seen[0][0], seen[1][0]
    assert torch.equal(first[:, 0], second[:, 0]) and not torch.equal(first[:, 1:], second[:, 1:])
