"""graph.rounds_per_replay: R rounds in one graph give what the same rounds give one at a time, records included."""

from __future__ import annotations

import dataclasses
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.config.choices import Rollback
from spec_lab.config.run import RecurrentConfig
from spec_lab.core.results import GenerationResult, RequestRecord, RoundRecord
from spec_lab.core.types import FinishReason, Request, Sequence, Verification
from spec_lab.engine.engine import Engine
from spec_lab.engine.scheduler import emit_round
from spec_lab.engine.stops import StopConditions
from spec_lab.options.graphs import RoundGraph
from spec_lab.options.trees import DynamicTreeConfig
from tests.covering import each_value
from tests.graph_lab import (
    DEVICES,
    DRAFTERS,
    PAGE_SIZE,
    RULES,
    Lab,
    assert_null_page_is_zero,
    live_state,
    make_lab,
    mixed_requests,
    synthetic,
)
from tests.tiny_hybrid import make_tiny_nextn

EOS = [2, 7, 11, 19, 26, 33]
NUM_DRAFTS = 3
CPU = torch.device("cpu")
OF_THE_CLOCK = ("seconds", "stage_seconds", "launch_seconds")
OF_THE_PADDING = ("drafted", "verified", "catchup_attention", "catchup_output", "catchup_mlp")
"""The rows that are computed for requests that have ended, too."""

ALL_RULES = {**RULES, "synthetic": synthetic(NUM_DRAFTS)}


@pytest.fixture(scope="module", params=DEVICES)
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A lab whose target has several ends of sequence, likely enough to come up inside a block."""
    return make_lab(tmp_path_factory.mktemp, request.param, eos_token_id=EOS)


def run(
    lab: Lab, requests: list[Request], num_rounds: int, keys: dict[str, bool] | None = None, **options: Any
) -> tuple[GenerationResult, Engine]:
    engine = lab.engine(requests, RoundGraph(rounds_per_replay=num_rounds, **(keys or {})), **options)
    return engine.generate(requests), engine


def without_times(record: RoundRecord, one_size: bool) -> dict[str, Any]:
    """What a round's line says, but for the clock; unless batches have `one_size`, but for what pads them too."""
    row = dataclasses.asdict(record)
    for key in OF_THE_CLOCK if one_size else (*OF_THE_CLOCK, "num_surplus"):
        del row[key]
    if not one_size:
        for key in OF_THE_PADDING:
            del row["rows"][key]
    return row


def without_clock(record: RequestRecord) -> RequestRecord:
    """A request's record, but for times and confidences."""
    timeless = [0.0] * len(record.emitted_at)
    return dataclasses.replace(record, arrived_at=0.0, admitted_at=0.0, emitted_at=timeless, confidence_per_round=[])


def confidences(result: GenerationResult) -> list[float]:
    rounds = chain.from_iterable(record.confidence_per_round for record in result.requests)
    return list(chain.from_iterable(rounds))


def assert_one_at_a_time(
    lab: Lab, requests: list[Request], num_rounds: int, keys: dict[str, bool] | None = None, **options: Any
) -> GenerationResult:
    """Compare requests, rounds, experts and all state with those of rounds that are replayed one by one.

    `keys`: more of the graph mode that replays several.
    """
    expected, one = run(lab, requests, 1, **options)
    result, several = run(lab, requests, num_rounds, keys, **options)
    assert result.graph.rounds_per_replay == num_rounds and expected.graph.rounds_per_replay == 1
    assert list(map(without_clock, result.requests)) == list(map(without_clock, expected.requests))
    # a batch that has shrunk is still whole within a replay, and torch's products round by their number of rows
    assert confidences(result) == pytest.approx(confidences(expected), rel=1e-5)
    assert result.experts_read == expected.experts_read
    assert_null_page_is_zero(several)
    if len(requests) <= several.scheduler.num_slots:  # nobody waited, so that the rounds are of the same requests
        one_size = several.scheduler.num_slots == 1
        rounds, expected_rounds = ([without_times(r, one_size) for r in part.rounds] for part in (result, expected))
        assert rounds == expected_rounds
        assert_same_state(several, one)
    num_replays = result.graph.replays - result.graph.captures  # each capture replays once
    assert len(result.rounds) + result.num_wasted_rounds == num_rounds * num_replays
    assert expected.num_wasted_rounds == 0
    return result


def assert_same_state(several: Engine, one: Engine) -> None:
    """Compare all that the next round would read: not what experts are counted by, which is of the round before."""
    state, expected = (
        {path: tensor for path, tensor in live_state(engine).items() if ".saw." not in path and "watch_" not in path}
        for engine in (several, one)
    )
    torch.testing.assert_close(state, expected, rtol=0, atol=1e-4)


def cut(result: GenerationResult) -> set[tuple[FinishReason, bool]]:
    """How requests ended, and whether inside a block."""
    return {(record.finish_reason, record.truncated) for record in result.requests}


def cells() -> list[Any]:
    """Every drafter, rule, R and batch size, in turn."""
    rows = each_value(DRAFTERS, ALL_RULES, (3, 2, 5), (3, 1))
    return [*rows, ("ngram", "synthetic", 3, 3), ("random", "strict", 2, 3)]


@pytest.mark.parametrize(("drafter", "rule", "num_rounds", "batch_size"), cells())
def test_several_rounds_give_what_one_at_a_time_gives(
    lab: Lab, drafter: str, rule: str, num_rounds: int, batch_size: int
) -> None:
    requests = mixed_requests(batch_size, 8, seed=5)
    options = {"drafter": drafter, "rule": ALL_RULES[rule], "batch_size": batch_size}
    assert_one_at_a_time(lab, requests, num_rounds, **options)


def test_requests_end_inside_blocks_while_others_wait(lab: Lab) -> None:
    """The target drafts for itself, so that blocks are full and an end of sequence lies anywhere in one; slots are used
    again, and admission waits for the end of a replay."""
    requests = mixed_requests(7, 12, seed=1)
    requests[2] = dataclasses.replace(requests[2], ignore_eos=True)
    options: dict[str, Any] = {"drafter": "draft_model", "rule": RULES["strict"], "batch_size": 2}
    result = assert_one_at_a_time(lab, requests, 2, **options)
    assert cut(result) >= {(FinishReason.EOS, True), (FinishReason.LENGTH, True)}
    assert any(record.num_surplus for record in result.rounds)


def test_more_rounds_than_remain_are_counted_as_wasted(lab: Lab) -> None:
    """They have no line, and their time is in those that have one."""
    requests = [Request("a", "x", (5, 6, 7), 4, ignore_eos=True), Request("b", "x", (9, 8), 1)]
    result, engine = run(lab, requests, 6, drafter="none", batch_size=1)
    assert [record.emitted for record in result.rounds] == [[1], [1], [1]] and result.num_wasted_rounds == 3
    assert {(record.num_surplus, record.rows.verified) for record in result.rounds} == {(0, 1)}
    assert len({record.seconds for record in result.rounds}) == 1
    in_prompts = sum(record.seconds for record in result.prefills)
    assert sum(record.seconds for record in result.rounds) + in_prompts <= result.seconds
    assert all(sum(record.stage_seconds.values()) <= record.seconds for record in result.rounds) or lab.device != "cpu"
    stages = [record.stage_seconds for record in result.rounds]
    if lab.device == "cpu":
        assert stages[0] == stages[1] == stages[2] and set(stages[0]) == {"graph", "readback"}
    else:
        assert all(set(part) == {"verify", "accept", "commit", "readback"} for part in stages)
    assert engine.graph.counts.nodes.keys() == {"rounds"}


def positions_reserved(engine: Engine) -> int:
    """How many positions past its last token a request gets pages for."""
    pages_of = []
    for num_tokens in range(2, 2 + PAGE_SIZE):
        engine.scheduler.submit([Request("asked", "x", (5,), num_tokens - 1)])
        [sequence] = engine.scheduler.admit(0.0)
        pages_of.append(len(sequence.pages) * PAGE_SIZE - num_tokens)
        engine.scheduler.release(sequence)
    return min(pages_of)


def test_a_replay_writes_no_further_than_its_rounds(lab: Lab) -> None:
    """A request that has ended is a padded row, so that the reach of a round past its last token is that of a replay
    too: no position more is reserved, and what an ended request left stays."""
    requests = [Request("a", "x", (5, 6, 7), 6, ignore_eos=True), Request("b", "x", (9, 8), 12, ignore_eos=True)]
    one, several = (lab.engine(requests, RoundGraph(rounds_per_replay=count), batch_size=2) for count in (1, 8))
    for engine in (one, several):
        assert positions_reserved(engine) == 2 * NUM_DRAFTS
        engine.generate(requests)
    assert_same_state(several, one)


@pytest.mark.parametrize(("num_requests", "batch_size", "rule"), [(3, 3, "strict"), (4, 2, "relaxed")])
def test_a_replay_launched_ahead_finds_the_ends_on_the_device(
    lab: Lab, num_requests: int, batch_size: int, rule: str
) -> None:
    """It runs for those that go on, or for nobody; slots are used again, and no position more is reserved."""
    requests = mixed_requests(num_requests, 12, seed=1)
    options = {"drafter": "draft_model", "rule": RULES[rule], "batch_size": batch_size}
    result = assert_one_at_a_time(lab, requests, 3, {"overlap": True}, **options)
    assert all(record.stage_seconds == {} for record in result.rounds)
    assert result.num_wasted_rounds >= 3
    ahead = RoundGraph(rounds_per_replay=3, overlap=True)
    assert positions_reserved(lab.engine(requests, ahead, batch_size=batch_size)) == 2 * NUM_DRAFTS


def test_what_is_in_flight_is_read_before_a_launch_without_those_that_ended(lab: Lab) -> None:
    """One ends in a replay, the other in the next, which is in flight when the host hears of the first."""
    lengths = {"a": 4, "b": 6}
    requests = [Request(name, "x", (5, 6, 7), length, ignore_eos=True) for name, length in lengths.items()]
    options: dict[str, Any] = {"drafter": "none", "rule": RULES["strict"], "batch_size": 2}
    assert_one_at_a_time(lab, requests, 2, {"overlap": True}, **options)


def test_a_round_launched_ahead_of_the_end_of_a_text_is_nobodys(lab: Lab) -> None:
    """One at a time: the end is heard of behind the next launch, long before the limit, and then the slot is free."""
    requests = [Request(str(number), "x", (5, 6, 7 + number), 60) for number in range(6)]
    options: dict[str, Any] = {"drafter": "draft_model", "rule": RULES["strict"], "batch_size": 2}
    expected, _ = run(lab, requests, 1, **options)
    result, _ = run(lab, requests, 1, {"overlap": True}, **options)
    assert list(map(without_clock, result.requests)) == list(map(without_clock, expected.requests))
    ended = [len(record.output_ids) for record in result.requests if record.finish_reason is FinishReason.EOS]
    assert ended and min(ended) < 60 - 3 * (NUM_DRAFTS + 1)


def test_the_time_of_a_replay_for_nobody_is_in_the_round_before_it(lab: Lab) -> None:
    requests = [Request("a", "x", (5, 6, 7), 9, ignore_eos=True)]
    result, _ = run(lab, requests, 2, {"overlap": True}, drafter="none", batch_size=1)
    assert [record.emitted for record in result.rounds] == [[1]] * 8 and result.num_wasted_rounds == 2
    seconds = [record.seconds for record in result.rounds]
    assert seconds[-1] > seconds[-2] and seconds[0] == seconds[1]
    assert sum(seconds) + result.prefills[0].seconds <= result.seconds


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("accepts_unseen", [False, True])
def test_the_device_ends_a_request_where_the_host_does(ignore_eos: bool, accepts_unseen: bool) -> None:
    """Blocks of every length with an end of sequence anywhere or nowhere, at every distance from the limit."""
    ends = set()
    for num_emitted, place, room in product((1, 2, 4), (None, 0, 1, 2, 3), (1, 2, 3, 4, 6)):
        tokens = [EOS[1] if index == place else 5 for index in range(4)]
        request = Request("a", "x", (5, 6, 7), 3 + room, ignore_eos=ignore_eos)
        sequence = Sequence(request, 1, [], 0.0, tokens=[5, 6, 7, 8, 9, 10], kv_len=5)
        num_imposed = num_emitted - 1 if accepts_unseen else 0
        emit_round(sequence, tokens[:num_emitted], "a" * num_emitted, frozenset(EOS), 0.0, 3, num_imposed)
        verification = Verification(torch.tensor([[5] * 4, tokens]), torch.tensor([0, num_emitted]))
        slot_ids, kv_lens = torch.tensor([2, 1]), torch.tensor([0, sequence.kv_len, 0])
        stops = StopConditions(2, EOS, CPU)
        stops.admit(1, request)
        going_on = stops.going_on(slot_ids, kv_lens, verification, accepts_unseen)
        assert going_on.tolist() == [2, 1 if sequence.finish_reason is None else 2], (num_emitted, place, room)
        ends.add(sequence.finish_reason)
    assert ends == {None, FinishReason.LENGTH} | (set() if ignore_eos else {FinishReason.EOS})


def test_states_of_slots_that_idle_do_not_move(tmp_path: Path) -> None:
    """Gated delta nets keep a state a slot, which a row more would move on; experts that idle rows choose do not
    count."""
    make_tiny_nextn(tmp_path, "qwen3_5_moe", eos_token_id=EOS)
    hybrid = Lab(tmp_path, {"mtp_eagle": tmp_path}, "cpu")
    options: dict[str, Any] = {"drafter": "mtp_eagle", "batch_size": 3, "recurrent": RecurrentConfig(Rollback.replay)}
    result = assert_one_at_a_time(hybrid, mixed_requests(3, 8), 3, **options)
    assert any(record.num_surplus for record in result.rounds)


def test_trees_go_on_without_the_host(lab: Lab) -> None:
    options: dict[str, Any] = {"tree": DynamicTreeConfig(topk=3, num_rows=9)}
    assert_one_at_a_time(lab, mixed_requests(3, 8, seed=5), 3, batch_size=3, rule=RULES["strict"], **options)
