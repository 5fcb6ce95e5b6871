"""The real thing on the tape: rules and whole rounds replay as they run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.acceptance.phase import RelaxationPhase, RoundPhase, ThinkingMarkers, TokenPhase
from spec_lab.acceptance.relaxed import DeltaForm, RelaxedThinkingAcceptance
from spec_lab.config.run import SamplingConfig
from spec_lab.core.kv_cache import NUM_RESERVED_PAGES
from spec_lab.core.types import AcceptanceInputs, DraftStep, RoundBatch, Verification
from spec_lab.engine.capture import CaptureError
from spec_lab.engine.engine import Engine
from spec_lab.engine.tape import TapeGraph
from spec_lab.options.acceptance.rejection import Rejection
from spec_lab.options.acceptance.synthetic import Synthetic
from tests.captures import capture, flat, same
from tests.graph_lab import MODES, RULES, Lab, Outcome, generate_watched, make_lab, mixed_requests, outcome
from tests.lab import make_config, make_engine, make_pair, random_requests

ROWS = 4


def phases() -> dict[str, Callable[[], RelaxationPhase]]:
    markers, device = ThinkingMarkers(3, 4), torch.device("cpu")
    return {
        "token": lambda: TokenPhase(ROWS, markers, [2], device),
        "round": lambda: RoundPhase(ROWS, markers, 8, device),
    }


@pytest.mark.parametrize("phase", phases())
def test_relaxed_acceptance_replays(phase: str) -> None:
    """Its phase is state by slot: three rounds of the tape are three rounds of the rule."""
    taped, eager = (RelaxedThinkingAcceptance(DeltaForm(0.9), 3, phases()[phase]()) for _ in range(2))
    slot_ids = torch.arange(ROWS)
    inputs = AcceptanceInputs(
        torch.zeros(ROWS, 4, 6),
        torch.zeros(ROWS, 3, dtype=torch.int64),
        torch.tensor([True] * 3 + [False]),
        slot_ids,
        slot_ids * 5,
    )
    graph = capture(lambda: taped.accept(inputs))
    eager.accept(inputs)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        inputs.logits.copy_(torch.randn(ROWS, 4, 6, generator=generator) * 2)
        inputs.draft_tokens.copy_(torch.randint(1, 6, (ROWS, 3), generator=generator))
        graph.replay()
        assert same(flat(graph.outputs), flat(eager.accept(inputs)))


MAX_KV_LEN = 90
ROUNDS: dict[str, dict[str, Any]] = {
    "plain": {"drafter": "none"},
    "eagle3": {},
    "one_draft": {"num_draft_tokens": 1},
    "pruned": {"prune": "catchup"},
    "ngram": {"drafter": "ngram"},
    "random": {"drafter": "random"},
    "synthetic": {"acceptance": Synthetic()},
    "sampled": {"acceptance": Rejection(), "options": {"draft_sampling": "distribution"}},
    "block": {"acceptance": Rejection(method="block"), "options": {"draft_sampling": "distribution"}},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"))


def prefilled_engine(pair: tuple[Path, Path], options: dict[str, Any]) -> tuple[Engine, list[int]]:
    """Build an engine with three requests behind their prompt pass, and return their slots with it."""
    options = dict(options)
    acceptance = options.pop("acceptance", None)
    config = make_config(pair, batch_size=3, **options)
    if acceptance is not None:
        config.acceptance, config.sampling = acceptance, SamplingConfig(temperature=0.8)
    requests = random_requests(3, max_new_tokens=40)
    engine = make_engine(config, requests)
    engine.scheduler.submit(requests)
    parts = engine.parts
    sequences = engine.scheduler.admit(0.0)
    with torch.inference_mode():
        for sequence in sequences:
            parts.slots.table.assign(sequence.slot, sequence.pages)
            parts.rule.admit(sequence.slot, sequence.request)
            parts.drafter.admit(sequence.slot, sequence.request)
            while sequence.is_prefilling:
                engine.prompt_pass.run([sequence])
    return engine, [sequence.slot for sequence in sequences]


def live_state(engine: Engine) -> list[torch.Tensor]:
    """Copy slots and KV, without the scratch slot and the reserved pages."""
    slots, cache = engine.parts.slots, engine.parts.cache
    return [slots.kv_lens[:-1], slots.input_ids[:-1], cache.kv[:, NUM_RESERVED_PAGES * slots.table.page_size :]]


@pytest.mark.parametrize("case", ROUNDS)
def test_a_captured_round_equals_an_eager_one(pair: tuple[Path, Path], case: str) -> None:
    """It is captured on scratch rows, and replayed on three requests and on two of them."""
    (taped, slots), (eager, _) = (prefilled_engine(pair, ROUNDS[case]) for _ in range(2))
    slot_ids = taped.parts.slots.ids([], 4)
    before = [tensor.clone() for tensor in live_state(taped)]
    graph: TapeGraph[Verification] = capture(lambda: taped.round.run(taped.round.load(slot_ids, MAX_KV_LEN)))
    assert same(live_state(taped), before)
    for used in (slots, slots[:2], slots[1:], slots):
        slot_ids.copy_(taped.parts.slots.ids(used, 4))
        graph.replay()
        with torch.inference_mode():
            expected = eager.round.run(eager.round.load(eager.parts.slots.ids(used, 4), MAX_KV_LEN))
        assert torch.equal(graph.outputs.num_emitted, expected.num_emitted)
        assert torch.equal(graph.outputs.tokens[: len(used)], expected.tokens[: len(used)])
        assert same(live_state(taped), live_state(eager))


def freeze_step_index(engine: Engine) -> None:
    """Make the mistake of using the step's number as Python has it, where the device's is meant."""
    drafter: Any = engine.parts.drafter
    step = drafter.step

    def wrong(state: Any, now: DraftStep) -> None:
        step(state, DraftStep(now.index, torch.full_like(now.column, now.index)))

    drafter.step = wrong


def freeze_lengths(engine: Engine) -> None:
    """Make the mistake of using committed lengths as the host knows them."""
    slots: Any = engine.parts.slots
    batch = slots.batch

    def wrong(slot_ids: torch.Tensor, max_kv_len: int) -> RoundBatch:
        loaded: RoundBatch = batch(slot_ids, max_kv_len)
        loaded.kv_lens = torch.full_like(loaded.kv_lens, engine.scheduler.running[0].kv_len)
        return loaded

    slots.batch = wrong


def replace_buffer(engine: Engine) -> None:
    """Make the mistake of putting a new tensor of lengths each round in place of the old one rewritten."""
    slots: Any = engine.parts.slots
    commit = slots.commit

    def wrong(*arguments: Any) -> None:
        slots.kv_lens = slots.kv_lens.clone()
        commit(*arguments)

    slots.commit = wrong


def ask_for_a_number(engine: Engine) -> None:
    """Make the mistake of a step that looks at its own draft."""
    drafter: Any = engine.parts.drafter
    step = drafter.step

    def wrong(state: Any, now: DraftStep) -> None:
        step(state, now)
        if state.tokens.max().item() < 0:
            raise AssertionError

    drafter.step = wrong


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp, "cpu")


FROZEN = [
    (freeze_step_index, "step_replay"),
    (freeze_lengths, "round"),
    (replace_buffer, "full_loop"),
]


def run_watched(lab: Lab, mode: str | None, inject: Callable[[Engine], None] | None) -> Outcome:
    """Run one request, with drafts that are sampled, so that the step index counts."""
    requests = mixed_requests(1, 16)
    engine = lab.engine(requests, MODES[mode] if mode else None, batch_size=1, rule=RULES["sampled"])
    if inject is not None:
        inject(engine)
    with torch.inference_mode():  # a replaced buffer is an inference tensor, which the engine clears at the end
        return outcome(*generate_watched(engine, requests))


@pytest.mark.parametrize(("inject", "mode"), FROZEN)
def test_what_a_capture_freezes_shows_in_the_drafts(lab: Lab, inject: Callable[[Engine], None], mode: str) -> None:
    """Each mistake is none in eager rounds, and a replay repeats what it was at capture."""
    eager = run_watched(lab, None, None)
    assert run_watched(lab, None, inject) == eager and run_watched(lab, mode, None) == eager
    (_, _, drafts), (_, _, wrong) = eager["r0"], run_watched(lab, mode, inject)["r0"]
    assert drafts != wrong


def test_a_buffer_replaced_inside_a_whole_round_shows_at_capture(lab: Lab) -> None:
    """The slots then hold a result of the tape, which the capture leaves poisoned."""
    with pytest.raises(AssertionError, match=r"capture changed.*kv_lens"):
        run_watched(lab, "round", replace_buffer)


@pytest.mark.parametrize("mode", ["split_seed", "step_replay", "full_loop", "round"])
def test_a_number_asked_of_the_device_is_refused(lab: Lab, mode: str) -> None:
    requests = mixed_requests(1, 6)
    eager, captured = (lab.engine(requests, graph, batch_size=1) for graph in (None, MODES[mode]))
    for engine in (eager, captured):
        ask_for_a_number(engine)
    eager.generate(requests)
    with pytest.raises(CaptureError, match="item"):
        captured.generate(requests)
