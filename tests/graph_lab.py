"""Helpers that run one engine under a graph mode and another eagerly, watch every round of both, and compare all that
must be equal: drafts, tokens, KV and every other tensor of state.

`PoisoningRecorder` makes the tape as strict as graphs that share a pool: only outputs survive a replay.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from spec_lab.acceptance.phase import ThinkingMarkers
from spec_lab.build.engine import build_engine
from spec_lab.build.limits import engine_limits
from spec_lab.build.models import load_models
from spec_lab.checkpoints.families import read_model_config
from spec_lab.config.groups import AcceptanceConfig, GraphConfig
from spec_lab.config.run import SamplingConfig
from spec_lab.core.kv_cache import NULL_PAGE, SCRATCH_PAGE
from spec_lab.core.results import GenerationResult
from spec_lab.core.types import Request, Sequence, Verification
from spec_lab.engine.capture import CapturedGraph
from spec_lab.engine.engine import Engine
from spec_lab.engine.tape import TapeRecorder, poison
from spec_lab.engine.torch_internals import storage_id
from spec_lab.options.acceptance.imposed import Synthetic
from spec_lab.options.acceptance.lossless import Rejection, Strict
from spec_lab.options.acceptance.lossy import RelaxedThinking
from spec_lab.options.graphs import FullLoop, RoundGraph, SplitSeed, StepReplay
from tests.captures import flat
from tests.engine_state import find_tensors, is_cache
from tests.lab import make_config, make_pair, part, random_requests
from tests.tiny_assistant import make_tiny_assistant
from tests.tiny_mtp import make_tiny_mtp

MODES: dict[str, GraphConfig] = {
    "split_seed": SplitSeed(),
    "step_replay": StepReplay(),
    "full_loop": FullLoop(),
    "round": RoundGraph(),
    "overlap": RoundGraph(overlap=True),
    "verify_eager": FullLoop(verify=False),
}
DRAFTERS = ("eagle3", "mtp_eagle", "mtp_vanilla", "frozen_kv", "draft_model")
"""Every drafter with weights; all can be captured."""

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
PAGE_SIZE, VOCAB_SIZE = 4, 40
MARKERS = ThinkingMarkers(3, 4)
SAMPLED = SamplingConfig(temperature=0.8)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Rule:
    """An acceptance rule, and how drafts and tokens are picked under it."""

    acceptance: AcceptanceConfig
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    draft_sampling: str = "greedy"


RULES = {
    "strict": Rule(Strict()),
    "relaxed": Rule(RelaxedThinking(delta=0.9)),
    "sampled": Rule(Rejection(), SAMPLED, "distribution"),
}


def synthetic(num_draft_tokens: int) -> Rule:
    """A rule under which every accepted length occurs, about equally often, whatever the drafts are worth."""
    count = num_draft_tokens
    return Rule(Synthetic(rates=[1 - index / (count + 1) for index in range(1, count + 1)]))


def make_lab(make_folder: Callable[[str], Path], device: str, **overrides: Any) -> Lab:
    """A lab on a tiny random pair; `overrides` are keys of the target's configuration."""
    target, head = make_pair(make_folder("pair"), vocab_size=VOCAB_SIZE, **overrides)
    config = read_model_config(target)
    folders = {"eagle3": head, "none": head, "draft_model": target}
    folders |= {name: make_folder(name) for name in DRAFTERS if name not in folders}
    make_tiny_mtp(folders["mtp_eagle"], "ours", config)
    make_tiny_mtp(folders["mtp_vanilla"], "ours", config, num_modules=3)
    make_tiny_assistant(folders["frozen_kv"], config)
    return Lab(target, folders, device)


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
        rule: Rule | None = None,
        **changes: Any,
    ) -> Engine:
        """An engine on this pair; a `graph` of None is eager, and a `rule` of None accepts at set rates."""
        rule = rule or (synthetic(num_draft_tokens) if drafter != "none" else RULES["strict"])
        options = changes.pop("options", {})
        if drafter in DRAFTERS:
            options = {"draft_sampling": rule.draft_sampling} | options
        config = make_config(
            (self.target, self.folders.get(drafter, self.target)),
            drafter,
            num_draft_tokens,
            prune,
            cache={"page_size": PAGE_SIZE},
            device=self.device,
            dtype="float32",
            options=options,
            **changes,
        )
        config = dataclasses.replace(
            config, attention=part("attention", attention), acceptance=rule.acceptance, sampling=rule.sampling
        )
        if graph is not None:
            config = dataclasses.replace(config, graph=graph)
        chosen = config
        limits = engine_limits(chosen, requests)
        models = load_models(chosen, limits.max_seq_len, MARKERS)
        engine = build_engine(chosen, models, limits)
        mode: Any = engine.graph
        if graph is not None and self.device == "cpu":
            assert isinstance(mode.recorder, TapeRecorder)
            mode.recorder = PoisoningRecorder()
        return engine


def mixed_requests(count: int, max_new_tokens: int, seed: int = 0, longest: int = 12) -> list[Request]:
    """Requests with prompts of 1 to `longest` tokens, of which each second one ends inside thinking. Their outputs
    differ in length, so that slots come free one by one and every bucket is used.
    """
    requests = random_requests(count, max_new_tokens, seed, VOCAB_SIZE, (1, longest))
    draw = random.Random(seed)
    return [
        dataclasses.replace(
            request,
            prompt_ids=(*request.prompt_ids, MARKERS.begin) if index % 2 else request.prompt_ids,
            max_new_tokens=max_new_tokens if index == 0 else draw.randint(max_new_tokens // 2 + 1, max_new_tokens),
        )
        for index, request in enumerate(requests)
    ]


def live_state(engine: Engine) -> dict[str, torch.Tensor]:
    """Copies of every tensor of state, without the scratch page of a cache and the scratch row of per-slot state."""
    scratch = slice(SCRATCH_PAGE * PAGE_SIZE, (SCRATCH_PAGE + 1) * PAGE_SIZE)
    num_rows = engine.parts.slots.kv_lens.shape[0]
    state = {}
    for path, tensor in find_tensors(engine).items():
        if is_cache(engine, tensor):
            head, tail = tensor[..., : scratch.start, :, :, :], tensor[..., scratch.stop :, :, :, :]
            state[path] = torch.cat((head, tail), dim=-4)
        else:
            state[path] = tensor[:-1].clone() if tensor.shape[:1] == (num_rows,) else tensor.clone()
    return state


def live_kv(engine: Engine) -> dict[str, torch.Tensor]:
    """The caches in `live_state`: of the target, and of a drafter that has its own."""
    caches = {path for path, tensor in find_tensors(engine).items() if is_cache(engine, tensor)}
    return {path: tensor for path, tensor in live_state(engine).items() if path in caches}


def assert_null_page_is_zero(engine: Engine) -> None:
    rows = slice(NULL_PAGE * PAGE_SIZE, (NULL_PAGE + 1) * PAGE_SIZE)
    caches = [tensor for tensor in find_tensors(engine).values() if is_cache(engine, tensor)]
    assert caches and all(not cache[..., rows, :, :, :].any() for cache in caches)


class Watch:
    """A watch that follows an engine: what its rounds left, and whether a capture changed state.

    Attributes:
        inputs: by request, the pending token and the drafts [N] that each of its rounds left.
        sizes: of each round, the number of requests and of rows.
        committed: by request, the KV at its committed positions when its slot came free, by path.
        num_captures: calls of `prepare` that captured, each checked to have changed no state.
        was_live: some of them found a running request.
    """

    def __init__(self, engine: Engine) -> None:
        self.inputs: dict[str, list[torch.Tensor]] = {}
        self.sizes: list[tuple[int, int]] = []
        self.committed: dict[str, dict[str, torch.Tensor]] = {}
        self.num_captures = 0
        self.was_live = False
        self._engine = engine
        mode, scheduler = engine.graph, engine.scheduler
        self._run, self._prepare, self._release = mode.run, mode.prepare, scheduler.release
        mode.run, mode.prepare, scheduler.release = self.run, self.prepare, self.release  # type: ignore[method-assign]

    def run(self, decode_round: Any, slots: list[int], max_kv_len: int) -> Verification:
        verification = self._run(decode_round, slots, max_kv_len)
        self.sizes.append((len(slots), self._engine.graph.padded_size(len(slots))))
        for sequence in self._engine.scheduler.running:
            if sequence.slot in slots:
                inputs = self._engine.parts.slots.input_ids[sequence.slot].clone()
                self.inputs.setdefault(sequence.request.request_id, []).append(inputs)
        return verification

    def prepare(self, *arguments: Any, **options: Any) -> Any:
        counts = self._engine.graph.counts
        num_captures, before = counts.captures, live_state(self._engine)
        result = self._prepare(*arguments, **options)
        if counts.captures > num_captures:
            self.num_captures += 1
            self.was_live |= bool(before["slots.kv_lens"].any())
            after = live_state(self._engine)
            # What a warm-up derives once and keeps may be new; what was there must be as it was, to the byte.
            changed = [path for path, old in before.items() if not _same_bytes(old, after[path])]
            assert not changed, f"capture changed {changed}"
        return result

    def release(self, sequence: Sequence) -> None:
        engine = self._engine
        pages = torch.tensor(sequence.pages, device=engine.parts.cache.kv.device)
        rows = (pages.unsqueeze(1) * PAGE_SIZE + torch.arange(PAGE_SIZE, device=pages.device)).flatten()
        # A drafter's last rows hold what the drafts of one round more would settle.
        num_settled = sequence.kv_len - engine.num_draft_tokens
        self.committed[sequence.request.request_id] = {
            path: tensor.index_select(
                tensor.dim() - 4, rows[: num_settled if path.startswith("drafter") else sequence.kv_len]
            )
            for path, tensor in find_tensors(engine).items()
            if is_cache(engine, tensor)
        }
        self._release(sequence)

    def drafts(self, request_id: str, num_rounds: int) -> list[list[int]]:
        """The inputs that each of the first rounds of a request left; with overlap a surplus round follows them."""
        assert len(self.inputs[request_id]) >= num_rounds
        return [inputs.tolist() for inputs in self.inputs[request_id][:num_rounds]]


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.flatten().view(torch.uint8), right.flatten().view(torch.uint8))


Outcome = dict[str, tuple[list[int], list[int], list[list[int]]]]


def outcome(result: GenerationResult, watch: Watch | None = None) -> Outcome:
    """The tokens of each request, its accepted lengths and, if a `Watch` was there, each round's drafts."""
    outcomes = {}
    for record in result.requests:
        num_rounds = len(record.accepted_per_round)
        drafts = watch.drafts(record.request_id, num_rounds) if watch and num_rounds else []
        outcomes[record.request_id] = (record.output_ids, record.accepted_per_round, drafts)
    return outcomes


def generate_watched(engine: Engine, requests: list[Request]) -> tuple[GenerationResult, Watch]:
    watch = Watch(engine)
    return engine.generate(requests), watch


def assert_equal_to_eager(lab: Lab, graph: GraphConfig, requests: list[Request], **options: Any) -> GenerationResult:
    """Generate under a graph mode and eagerly, and compare tokens, accepted lengths, every round's drafts and all
    state; a capture must change nothing, and the null page must stay zero.

    On a GPU a product of a padded batch may round otherwise, so one request may part from eager at a near tie; state
    is compared where none did.
    """
    eager, captured = lab.engine(requests, None, **options), lab.engine(requests, graph, **options)
    expected, eager_watch = generate_watched(eager, requests)
    result, watch = generate_watched(captured, requests)
    assert_null_page_is_zero(captured)
    left, right = outcome(result, watch), outcome(expected, eager_watch)
    parted = [name for name in right if left[name] != right[name]]
    if lab.device == "cpu" or len(parted) > 1:
        assert left == right
    if not parted:
        _assert_close(watch.committed, eager_watch.committed)
        if not captured.overlap:  # surplus rounds write on
            _assert_close(live_state(captured), live_state(eager))
    return result


def _assert_close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def accepted_lengths(result: GenerationResult) -> set[int]:
    return {count for record in result.requests for count in record.accepted_per_round}


@dataclass(slots=True)
class PoisonedGraph:
    """A tape whose intermediate results are gone after each replay, as where another graph of the pool ran since."""

    graph: CapturedGraph[Any]
    temporaries: list[torch.Tensor]

    @property
    def outputs(self) -> Any:
        return self.graph.outputs

    @property
    def num_nodes(self) -> int | None:
        return self.graph.num_nodes

    def replay(self) -> None:
        self.graph.replay()
        with torch.inference_mode():
            for tensor in self.temporaries:
                poison(tensor)


class PoisoningRecorder(TapeRecorder):
    """A `TapeRecorder` whose graphs are poisoned behind each replay."""

    def capture(self, function: Callable[[], Result]) -> Any:
        graph = super().capture(function)
        kept = {storage_id(tensor) for tensor in flat(graph.outputs)}
        return PoisonedGraph(graph, [tensor for tensor in graph.results if storage_id(tensor) not in kept])


@pytest.fixture(scope="module", params=DEVICES)
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp, request.param)
