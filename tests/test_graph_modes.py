"""Graph modes on the CPU recorder: the same drafts, tokens and KV as eager, on scratch rows and nothing else."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from spec_lab.core.kept import Drop
from spec_lab.engine.graphs.segment import Segment
from spec_lab.engine.readback import RoundResult, read_later
from tests.covering import each_value
from tests.graph_lab import (
    DRAFTERS,
    MODES,
    RULES,
    Lab,
    accepted_lengths,
    assert_equal_to_eager,
    lab,
    mixed_requests,
    outcome,
)
from tests.lab import random_requests

__all__ = ["lab"]
PLAIN_MODES = ("split_seed", "step_replay", "full_loop", "round")


@pytest.mark.parametrize("mode", MODES)
def test_a_captured_mode_gives_what_eager_gives(lab: Lab, mode: str) -> None:
    """The requests meet exact and padded batches, reused slots, prompts of one token, page borders and the maximum
    length. Other numbers of drafts and prunes: `test_lossless.py`.
    """
    requests = mixed_requests(7, 12)
    result = assert_equal_to_eager(lab, MODES[mode], requests, batch_size=5)
    assert result.graph.captures > 0 and result.graph.replays > result.graph.captures
    assert len(accepted_lengths(result)) >= 3


@pytest.mark.parametrize(("drafter", "mode"), each_value([name for name in DRAFTERS if name != "eagle3"], PLAIN_MODES))
def test_every_drafter_can_be_captured(lab: Lab, mode: str, drafter: str) -> None:
    """EAGLE-3, the first drafter, has the test above."""
    requests = mixed_requests(4, 10)
    result = assert_equal_to_eager(lab, MODES[mode], requests, drafter=drafter, batch_size=3)
    assert len(accepted_lengths(result)) >= 3
    steps = {"step_1", "step_2"} if drafter == "mtp_vanilla" else {"step_1"}
    names = {
        "split_seed": {"verify", "recur"},
        "step_replay": {"verify", "seed", *steps},
        "full_loop": {"verify", "draft"},
        "round": {"round"},
    }
    assert set(result.graph.nodes) == names[mode]


@pytest.mark.parametrize(
    ("mode", "rule", "drafter"), each_value(["step_replay", "round"], ["relaxed", "sampled"], DRAFTERS)
)
def test_rules_and_sampled_drafts_are_captured_alike(lab: Lab, mode: str, rule: str, drafter: str) -> None:
    """Phases, seeds and kept draft logits are state by slot, which a capture leaves alone and replays move on."""
    options = {"rule": RULES[rule], "drafter": drafter, "batch_size": 3}
    assert_equal_to_eager(lab, MODES[mode], mixed_requests(3, 6), **options)


def test_captured_triton_attention_gives_what_eager_gives(lab: Lab) -> None:
    """On a CPU it runs in Triton's interpreter, where every launch is a custom operator on the tape."""
    is_native = lab.device == "cuda"
    count = 6 if is_native else 2
    requests = mixed_requests(count, 20 if is_native else 3, longest=6)
    options = {"num_draft_tokens": 3 if is_native else 2, "batch_size": min(count, 5)}
    result = assert_equal_to_eager(lab, MODES["round"], requests, attention="triton", **options)
    assert result.graph.replays > 0


@pytest.mark.parametrize("mode", ["step_replay", "round", "overlap", "verify_eager"])
def test_plain_decoding_is_captured_alike(lab: Lab, mode: str) -> None:
    requests = random_requests(3, 7, vocab_size=40)
    result = assert_equal_to_eager(lab, MODES[mode], requests, drafter="none", batch_size=2)
    names = {"round"} if mode in ("round", "overlap") else set() if mode == "verify_eager" else {"verify"}
    assert set(result.graph.nodes) == names


@pytest.mark.parametrize("num_slots", [3, 5, 17])
def test_a_batch_is_padded_to_a_power_of_two_or_all_slots(lab: Lab, num_slots: int) -> None:
    requests = random_requests(num_slots, 2, vocab_size=40)
    mode = lab.engine(requests, MODES["round"], batch_size=num_slots).graph
    sizes = [mode.padded_size(count) for count in range(1, num_slots + 1)]
    powers = [next(size for size in (1, 2, 4, 8, 16, 32) if size >= count) for count in range(1, num_slots + 1)]
    assert sizes == [min(power, num_slots) for power in powers]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_a_round_makes_the_host_wait_for_nothing(lab: Lab, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no synchronisation between the launch of a round and the reading of its result."""
    if lab.device == "cpu":
        pytest.skip("a CPU has no synchronisations")
    requests = mixed_requests(4, 10)
    engine = lab.engine(requests, MODES[mode], batch_size=3)
    graph: Any = engine.graph
    run = graph.run

    def without_waiting(function: Any, *arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return function(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    graph.run = lambda *arguments: without_waiting(run, *arguments)
    monkeypatch.setattr("spec_lab.engine.engine.read_later", lambda results: without_waiting(read_later, results))
    engine.generate(requests)


@pytest.mark.parametrize("mode", ["round", "step_replay"])
def test_copies_of_a_graph_are_replayed_in_turn(lab: Lab, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the events of one are read while the other runs; both read and leave the same state."""
    requests = mixed_requests(3, 9)
    expected = lab.engine(requests, None, batch_size=2).generate(requests)
    engine = lab.engine(requests, MODES[mode], batch_size=2)
    graph: Any = engine.graph
    graph.recorder.num_copies = 2
    engine.prepare()
    call, called = Segment.__call__, list[Segment[Any, Any]]()

    def noted(segment: Segment[Any, Any], inputs: Any) -> Any:
        called.append(segment)
        return call(segment, inputs)

    monkeypatch.setattr(Segment, "__call__", noted)
    assert outcome(engine.generate(requests)) == outcome(expected)
    for bucket in graph.buckets.values():
        first = [next(iter(copy.values())) for copy in bucket.copies]
        mine = [segment for segment in called if segment in first]
        assert len(first) == 2 and len(mine) > 1
        assert all(left is not right for left, right in pairwise(mine))


def test_a_surplus_round_emits_nothing_and_frees_late(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """With overlap a finished sequence is in one more round; slot and pages come back only after that one is read."""
    requests = mixed_requests(4, 9)
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
    assert sum(record.num_surplus for record in result.rounds) == num_surplus
    assert scheduler.allocator.num_free == scheduler.allocator.num_total


def test_a_surplus_round_is_recorded_with_its_rows_and_its_time(lab: Lab) -> None:
    """What the machine did is what the record says: rounds, replays, catch-up rows and the time they took."""
    requests, batch_size = mixed_requests(4, 9), 3
    engine = lab.engine(requests, MODES["overlap"], batch_size=batch_size)
    result = engine.generate(requests)
    assert len(result.rounds) == result.graph.replays - result.graph.captures  # each capture replays once
    surplus = [record for record in result.rounds if not record.request_ids]
    assert surplus and all(record.num_surplus and record.seconds > 0 for record in surplus)
    for index, record in enumerate(result.rounds):
        num_launched = len(record.request_ids) + record.num_surplus
        padded = engine.graph.padded_size(num_launched)
        assert record.index == index and 1 <= num_launched <= batch_size
        rows = record.rows.catchup_attention, record.rows.catchup_output, record.rows.catchup_mlp
        every = padded * (engine.num_draft_tokens + 1)
        computed = {
            Drop.AFTER_LAYER: (every, every, every),
            Drop.AFTER_ATTENTION: (every, padded, padded),
            Drop.BEFORE_ATTENTION: (padded, padded, padded),
        }
        assert rows == computed[engine.prune.catchup(padded)]
        assert record.rows.catchup_live == len(record.request_ids) == len(record.emitted)
    in_rounds = sum(record.seconds for record in result.rounds)
    in_prompts = sum(record.seconds for record in result.prefills)
    assert in_rounds + in_prompts <= result.seconds


def test_an_engine_goes_on_after_a_run(lab: Lab) -> None:
    """Two passes over other requests use the same graphs."""
    engine = lab.engine(mixed_requests(3, 12, longest=60), MODES["full_loop"], batch_size=2)
    for seed in range(2):
        requests = mixed_requests(3, 12, seed, 30)
        expected = lab.engine(requests, None, batch_size=2).generate(requests)
        assert outcome(engine.generate(requests)) == outcome(expected)
    graph: Any = engine.graph  # verify and draft, for one and for two requests
    assert graph.counts.captures == 4 * graph.recorder.num_copies
