"""Requests that arrive over time: their times are drawn from a seed, and latencies count from arrival."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spec_lab.core.types import Request
from spec_lab.engine.pages import PageAllocator
from spec_lab.engine.scheduler import Scheduler
from spec_lab.measure.runner import record_run
from spec_lab.record.reading import read_requests
from spec_lab.workloads.arrivals import arriving
from tests.tiny_runs import make_run_config, write_prompts

REQUESTS = [Request(f"r{number}", "c", (1, 2), 4) for number in range(4000)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_shape_that_were_asked_for(burstiness: float) -> None:
    """A gamma distribution of shape k has a coefficient of variation of 1 / sqrt k; 1 is a Poisson process."""
    times = [request.arrives_at or 0.0 for request in arriving(REQUESTS, 8.0, burstiness, None, 3)]
    gaps = np.diff([0.0, *times])
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)
    assert times == [request.arrives_at for request in arriving(REQUESTS, 8.0, burstiness, None, 3)]
    assert times != [request.arrives_at for request in arriving(REQUESTS, 8.0, burstiness, None, 4)]


def test_duration_ends_arrivals() -> None:
    some = arriving(REQUESTS, 8.0, 1.0, 10.0, 0)
    assert 40 < len(some) < 160 and max(request.arrives_at or 0.0 for request in some) <= 10.0
    assert some == arriving(REQUESTS, 8.0, 1.0, None, 0)[: len(some)]


def scheduler(num_slots: int, max_in_flight: int | None = None) -> Scheduler:
    return Scheduler(num_slots, PageAllocator(64), 4, max_seq_len=40, margin=0, max_in_flight=max_in_flight)


def coming(*times: float | None) -> list[Request]:
    return [Request(f"r{n}", "c", (1, 2), 4, arrives_at=at) for n, at in enumerate(times)]


def test_nobody_is_admitted_before_arrival_and_a_queue_counts_from_it() -> None:
    waiting = scheduler(1)
    waiting.submit(coming(1.0, 1.5, 9.0))
    assert waiting.admit(0.5) == [] and waiting.seconds_to_arrival(0.5) == 0.5 and waiting.has_work
    [first] = waiting.admit(1.2)
    assert (first.arrived_at, first.admitted_at) == (1.0, 1.2)
    assert waiting.admit(2.0) == [], "the slot is taken"
    waiting.release(first)
    [second] = waiting.admit(3.0)
    assert (second.arrived_at, second.admitted_at) == (1.5, 3.0)
    assert waiting.seconds_to_arrival(3.0) == 6.0


def test_without_a_rate_a_request_arrives_when_a_slot_is_free() -> None:
    waiting = scheduler(1)
    waiting.submit(coming(None, None))
    [first] = waiting.admit(0.5)
    waiting.release(first)
    [second] = waiting.admit(2.0)
    assert [(each.arrived_at, each.admitted_at) for each in (first, second)] == [(0.5, 0.5), (2.0, 2.0)]


def test_the_bound_on_requests_in_flight_holds_arrivals_back() -> None:
    """Two in flight: the third, due at 1 s, arrives when one has ended, and its time counts from there."""
    bounded = scheduler(4, max_in_flight=2)
    bounded.submit(coming(0.0, 0.0, 1.0))
    first, _ = bounded.admit(0.1)
    assert bounded.admit(2.0) == []
    bounded.release(first)
    [third] = bounded.admit(5.0)
    assert (third.arrived_at, third.admitted_at) == (5.0, 5.0)


def test_a_run_under_load_offers_the_same_to_its_references(pair: tuple[Path, Path], tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": "ab" * n, "form": "continue"} for n in range(1, 9)])
    config: Any = make_run_config(pair, prompts, references=["plain"], batch_size=2, max_new_tokens=6, repeats=2)
    config.workload.request_rate, config.workload.duration = 40.0, 0.12
    run = record_run(config, {}, tmp_path / "run")
    requests = read_requests(tmp_path / "run")
    assert 0 < len(requests) < 8, "those that would have arrived later are left out"
    assert run["num_requests"] == run.references["plain"]["num_requests"] == len(requests)
    arrivals = [request.arrived_at or 0.0 for request in requests]
    assert arrivals == sorted(arrivals) and arrivals[0] > 0 and arrivals[-1] <= 0.12
    for request in requests:
        assert request.admitted_at is not None and request.emitted_at is not None
        assert (request.arrived_at or 0.0) <= request.admitted_at < request.emitted_at[0]
    assert run["seconds"] >= arrivals[-1], "the engine waits for who is to come"
    assert run["repeats_identical"] is True and run["equal_to_plain"] == 1.0
    assert 0 < run["requests_in_flight"] <= len(requests)
    assert run["latency_ms.ttft.p99"] >= run["latency_ms.ttft.p50"] > 0
