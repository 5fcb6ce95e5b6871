"""The engine on a fake target, exactly: scheduler, pages, slots, chunks, padding, stops and counts together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_lab.core.kv_cache import NULL_PAGE
from spec_lab.core.protocols import Drafter
from spec_lab.core.results import GenerationResult
from spec_lab.core.types import FinishReason, Request, VerifiedRound
from spec_lab.engine.engine import Engine
from tests.fake_target import FakeTarget, PaddedGraph, ScriptedDrafter, make_fake_engine, scripted_rounds
from tests.lab import random_requests

VOCAB = 61


def scripted(num_draft_tokens: int, script: list[int]) -> Callable[[FakeTarget], Drafter[Any]]:
    return lambda target: ScriptedDrafter(num_draft_tokens, target, script)


def fake_requests(count: int, max_new_tokens: int = 12, seed: int = 0, longest: int = 20) -> list[Request]:
    return random_requests(count, max_new_tokens, seed, VOCAB, lengths=(1, longest))


def check(engine: Engine, target: FakeTarget, requests: list[Request]) -> GenerationResult:
    """Generate, and compare every request with the plain Python continuation; nothing may be left taken."""
    result = engine.generate(requests)
    assert [record.request_id for record in result.requests] == [request.request_id for request in requests]
    for request, record in zip(requests, result.requests, strict=True):
        expected = target.expected(request)
        assert record.output_ids == expected
        assert 1 + sum(record.emitted_per_round) == len(expected)
        stopped = expected[-1] in target.eos_token_ids and not request.ignore_eos
        assert record.finish_reason == (FinishReason.EOS if stopped else FinishReason.LENGTH)
        assert record.truncated == (record.emitted_per_round != [m + 1 for m in record.accepted_per_round])
        assert record.emitted_per_round[:-1] == [m + 1 for m in record.accepted_per_round[:-1]]
        assert len(record.emitted_at) == 1 + len(record.emitted_per_round)
        assert record.emitted_at == sorted(record.emitted_at)
    assert_nothing_taken(engine)
    return result


def assert_nothing_taken(engine: Engine) -> None:
    scheduler, slots = engine.scheduler, engine.parts.slots
    assert not scheduler.has_work
    assert scheduler.allocator.num_free == scheduler.allocator.num_total
    assert sorted(scheduler.free_slots) == list(range(slots.table.scratch_slot))
    assert not slots.kv_lens[slots.table.scratch_slot], "a padded row emitted"
    null_page = engine.parts.cache.kv[:, : (NULL_PAGE + 1) * slots.table.page_size]
    assert not null_page.any(), "the null page was written"


@pytest.mark.parametrize("prefill", ["all_rows", "last_row"])
@pytest.mark.parametrize("chunk", [1, 5, 512])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_any_page_size_and_chunk(page_size: int, chunk: int, prefill: str) -> None:
    requests = fake_requests(5)
    engine, target = make_fake_engine(
        scripted(3, [0, 3, 1, 2]), page_size=page_size, prefill_chunk=chunk, prefill=prefill
    )
    result = check(engine, target, requests)
    for request, prefilled in zip(requests, sorted(result.prefills, key=lambda p: p.request_id), strict=True):
        assert prefilled.num_prompt_tokens == len(request.prompt_ids)
        assert prefilled.num_chunks == -(-len(request.prompt_ids) // chunk)


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 5])
@pytest.mark.parametrize("script", [[0], [9], [1], [0, 1, 2, 3, 4, 5], [5, 0]])
def test_accepted_all_none_or_some_of_the_drafts(num_draft_tokens: int, script: list[int]) -> None:
    script = [min(count, num_draft_tokens) for count in script]
    requests = [replace(request, ignore_eos=True) for request in fake_requests(4, max_new_tokens=17)]
    engine, target = make_fake_engine(scripted(num_draft_tokens, script), num_slots=2)
    result = check(engine, target, requests)
    for record in result.requests:
        assert record.emitted_per_round == scripted_rounds(17, num_draft_tokens, script)


def test_length_limits_inside_a_block() -> None:
    """Every limit from one token up, with all drafts right: the last round is cut at every column."""
    requests = [
        Request(f"r{limit}", "limit", (7, 8, 9), max_new_tokens=limit, ignore_eos=True) for limit in range(1, 13)
    ]
    engine, target = make_fake_engine(scripted(4, [4]))
    result = check(engine, target, requests)
    assert {record.truncated for record in result.requests} == {True, False}
    cut = [record.emitted_per_round[-1] for record in result.requests if record.truncated]
    assert set(cut) == {1, 2, 3, 4}
    assert result.requests[0].emitted_per_round == []
    for record in result.rounds:
        rows = zip(record.accepted, record.emitted, record.truncated, strict=True)
        assert all(truncated == (emitted < accepted + 1) for accepted, emitted, truncated in rows)


def test_eos_inside_a_block_ends_the_request_there() -> None:
    """The stop token is chosen so that it falls on every column of a block, the prompt pass's token included."""
    columns = set()
    for seed in range(24):
        request = Request("r", "eos", (5 + seed, 9), max_new_tokens=16)
        engine, target = make_fake_engine(scripted(3, [3]), num_slots=1)
        continuation = target.continuation(request.prompt_ids, 16)
        stop = next(i for i in range(seed % 8, 16) if continuation[i] not in continuation[:i])
        target.eos_token_ids = frozenset({continuation[stop]})
        record = check(engine, target, [request]).requests[0]
        assert record.finish_reason is FinishReason.EOS
        assert len(record.output_ids) == stop + 1
        columns.add((stop - 1) % 4 if stop else -1)
    assert columns == {-1, 0, 1, 2, 3}


def test_eos_in_the_prompt_or_among_rejected_drafts_stops_nothing() -> None:
    request = Request("r", "eos", (2, 9, 2), max_new_tokens=12)
    engine, target = make_fake_engine(scripted(3, [0]))
    wrong = {(token + 1) % VOCAB for token in target.continuation(request.prompt_ids, 20)}
    target.eos_token_ids = frozenset({2} | wrong) - frozenset(target.continuation(request.prompt_ids, 12))
    assert len(check(engine, target, [request]).requests[0].output_ids) == 12


def test_rule_and_drafter_are_told_of_a_request_before_its_prompt_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they keep by slot is cleared at admission, and so is what the slot keeps itself, as states of layers."""
    engine, target = make_fake_engine(scripted(3, [1]), num_slots=1)
    calls: list[str] = []
    cleared: list[str] = []
    monkeypatch.setattr(
        engine.parts.slots.states, "clear", lambda slot: cleared.append(f"{slot} after {len(calls)}"), raising=False
    )
    for part in (engine.parts.rule, engine.parts.drafter):
        admit = part.admit

        def noted(slot: int, request: Request, admit: Callable[..., None] = admit) -> None:
            calls.append(f"{request.request_id} in {slot} after {len(target.forward_rows)}")
            admit(slot, request)

        monkeypatch.setattr(part, "admit", noted)
    check(engine, target, [Request(name, "x", (5, 6), 1) for name in "ab"])
    assert calls == ["a in 0 after 0"] * 2 + ["b in 0 after 1"] * 2
    assert cleared == ["0 after 0", "0 after 2"]


def test_a_freed_slot_is_filled_while_the_others_run() -> None:
    """Continuous admission: the long request never waits for the short ones that pass through the other slot."""
    long = Request("long", "x", (9, 8, 7), max_new_tokens=40, ignore_eos=True)
    shorts = [Request(f"s{i}", "x", (3 + i,), max_new_tokens=5, ignore_eos=True) for i in range(6)]
    engine, target = make_fake_engine(scripted(1, [0]), num_slots=2)
    result = check(engine, target, [long, *shorts])
    assert len(result.rounds) == 39, "rounds of the longest request, and none beside"
    assert [record.request_ids for record in result.rounds[:8]] == [["long", "s0"]] * 4 + [["long", "s1"]] * 4
    assert all("long" in record.request_ids for record in result.rounds)


def test_admission_waits_for_pages() -> None:
    """There are pages for one request of this size only, though three slots are free."""
    requests = [replace(request, prompt_ids=request.prompt_ids[:8]) for request in fake_requests(5, max_new_tokens=8)]
    needed = -(-(8 + 8 + 6) // 4)
    engine, target = make_fake_engine(scripted(3, [2]), num_pages=2 + needed)
    result = check(engine, target, requests)
    assert {len(record.request_ids) for record in result.rounds} == {1}


def test_first_come_first_served() -> None:
    """A small request does not overtake one that waits for pages."""
    small, large = (Request(name, "x", (5,) * size, 4) for name, size in (("small", 1), ("large", 24)))
    requests = [large, replace(large, request_id="large2"), small]
    engine, _ = make_fake_engine(scripted(1, [0]), num_pages=2 + 2 * 8 - 1)
    order: list[str] = []
    engine.generate(requests, on_finish=lambda record: order.append(record.request_id))
    assert order == ["large", "large2", "small"]


def test_requests_to_the_very_end_of_the_cache() -> None:
    """Prompt plus output fill max_seq_len and the position table; the drafts of the last rounds lie past both."""
    for num_draft_tokens in (1, 3, 5):
        requests = [
            Request(f"r{n}", "x", tuple(3 + i % 50 for i in range(n)), 32 - n, ignore_eos=True) for n in (1, 20, 29, 31)
        ]
        engine, target = make_fake_engine(
            scripted(num_draft_tokens, [num_draft_tokens, 0, 1]), max_seq_len=32, max_positions=32
        )
        check(engine, target, requests)


@pytest.mark.parametrize("bucket", [2, 4, 8])
def test_padded_rows_emit_nothing_and_touch_nothing(bucket: int) -> None:
    seen: list[VerifiedRound] = []
    requests = fake_requests(7, max_new_tokens=14)

    def on_catch_up(verified: VerifiedRound) -> None:
        seen.append(verified)
        assert not verified.verification.num_emitted[~verified.batch.active].any()
        assert (verified.verification.num_emitted[verified.batch.active] >= 1).all()

    engine, target = make_fake_engine(
        lambda target: ScriptedDrafter(3, target, [3, 1, 0], on_catch_up), graph=PaddedGraph(bucket)
    )
    result = check(engine, target, requests)
    assert any(not verified.batch.active.all() for verified in seen)
    for verified, record in zip(seen, result.rounds, strict=True):
        padded = ~verified.batch.active
        assert verified.batch.num_rows % bucket == 0
        assert verified.batch.num_rows - int(padded.sum()) == len(record.request_ids)
        assert not verified.batch.kv_lens[padded].any(), "L of a padded row stays 0"


def test_host_and_device_agree_between_rounds() -> None:
    """`len(tokens) == kv_len + 1`: the last token is pending, its KV is not in the cache yet."""
    engines: list[Engine] = []
    rounds = 0

    def on_catch_up(verified: VerifiedRound) -> None:
        nonlocal rounds
        rounds += 1
        running = {s.slot: s for s in engines[0].scheduler.running}
        for row, slot in enumerate(verified.batch.slot_ids.tolist()):
            sequence = running[slot]
            assert len(sequence.tokens) == sequence.kv_len + 1
            assert int(verified.batch.kv_lens[row]) == sequence.kv_len
            assert int(verified.batch.input_ids[row, 0]) == sequence.tokens[-1]

    requests = fake_requests(6, max_new_tokens=14)
    engine, target = make_fake_engine(lambda target: ScriptedDrafter(3, target, [3, 1, 0, 2], on_catch_up))
    engines.append(engine)
    check(engine, target, requests)
    assert rounds >= 8


def test_a_chunked_prompt_does_not_stop_the_others() -> None:
    """A long prompt goes in chunk by chunk while the rest decodes, and its rows never share a forward with theirs."""
    short, long = Request("s", "x", (9,), 30, ignore_eos=True), Request("l", "x", tuple(range(3, 43)), 4)
    engine, target = make_fake_engine(scripted(3, [0]), prefill_chunk=4)
    result = check(engine, target, [short, long])
    assert [record.request_ids for record in result.rounds[:9]] == [["s"]] * 9
    assert result.rounds[9].request_ids == ["s", "l"]
    assert target.forward_rows[0] == 1 + 4, "its first chunk is packed with the short prompt"
    assert {rows for rows in target.forward_rows[1:] if rows > 1} == {4, 8}


def test_records_come_back_in_the_order_of_submission_and_finish_in_their_own() -> None:
    requests = [Request(f"r{n}", "x", (5, 6), n, ignore_eos=True) for n in (9, 2, 5)]
    engine, _ = make_fake_engine(scripted(1, [0]))
    finished: list[str] = []
    result = engine.generate(requests, on_finish=lambda record: finished.append(record.request_id))
    assert finished == ["r2", "r5", "r9"]
    assert [record.request_id for record in result.requests] == ["r9", "r2", "r5"]


class Interrupted(RuntimeError):
    """The error that the drafter below raises."""


@pytest.mark.parametrize("moment", ["admit", "ingest", "catch_up", "step"])
def test_usable_after_an_error_in_the_middle_of_a_run(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = fake_requests(7, max_new_tokens=14)
    engine, target = make_fake_engine(scripted(3, [1, 3]), prefill_chunk=4)
    drafter = engine.parts.drafter
    original, calls = getattr(drafter, moment), 0

    def raises_once(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise Interrupted
        return original(*arguments)

    monkeypatch.setattr(drafter, moment, raises_once)
    with pytest.raises(Interrupted):
        engine.generate(requests)
    assert_nothing_taken(engine)
    check(engine, target, requests)


@pytest.mark.parametrize(
    ("request_", "fragments"),
    [
        (Request("bad", "x", (5,) * 40, 30), ("bad", "40 tokens", "max_new_tokens=30", "64", "cache.max_seq_len")),
        (
            Request("bad", "x", (5,) * 30, 30),
            ("bad", "17 pages with 4 tokens", "16 pages, of which 2 are reserved", "cache.num_pages to 19"),
        ),
        (Request("bad", "x", (), 3), ("bad", "empty prompt")),
        (Request("bad", "x", (5,), 0), ("bad", "max_new_tokens=0")),
    ],
)
def test_a_request_that_can_never_run_is_refused_before_any_runs(request_: Request, fragments: tuple[str, ...]) -> None:
    engine, target = make_fake_engine(scripted(3, [1]), num_pages=16)
    good = Request("good", "x", (5, 6), 4)
    with pytest.raises(ValueError) as caught:
        engine.generate([good, request_])
    assert all(fragment in str(caught.value) for fragment in fragments)
    assert "\n" not in str(caught.value)
    assert target.forward_rows == []
    assert_nothing_taken(engine)
    check(engine, target, [good])


workloads = st.lists(
    st.tuples(st.integers(1, 23), st.integers(1, 12), st.booleans()).map(
        lambda drawn: Request(
            "", "x", tuple(3 + (7 * i + drawn[0]) % 50 for i in range(drawn[0])), drawn[1], None, drawn[2]
        )
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(
    requests=workloads,
    script=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    num_draft_tokens=st.integers(1, 5),
    num_slots=st.integers(1, 4),
    page_size=st.sampled_from([1, 2, 4, 16]),
    chunk=st.sampled_from([1, 3, 5, 512]),
    bucket=st.integers(1, 4),
    spare_pages=st.integers(0, 12),
    prefill=st.sampled_from(["all_rows", "last_row"]),
)
def test_any_workload_gives_the_plain_continuation(
    requests: list[Request],
    script: list[int],
    num_draft_tokens: int,
    num_slots: int,
    page_size: int,
    chunk: int,
    bucket: int,
    spare_pages: int,
    prefill: str,
) -> None:
    requests = [replace(request, request_id=f"r{index}") for index, request in enumerate(requests)]
    longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
    engine, target = make_fake_engine(
        scripted(num_draft_tokens, script),
        num_slots=num_slots,
        max_seq_len=longest,
        page_size=page_size,
        num_pages=2 + -(-(longest + 2 * num_draft_tokens) // page_size) + spare_pages,
        prefill_chunk=chunk,
        prefill=prefill,
        graph=PaddedGraph(bucket),
        vocab_size=17,
    )
    check(engine, target, requests)
