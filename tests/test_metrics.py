"""Each metric against a case worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from spec_lab.core.results import GenerationResult, GraphCounts, PrefillRecord, RowCounts
from spec_lab.record import acceptance_metrics, answer_metrics, averages, time_metrics
from spec_lab.record.definitions import DEFINITIONS
from tests.fake_runs import MAIN, PLAIN, make_request, make_round, make_summary

K = 3


def test_acceptance_length_is_pooled_not_averaged_over_requests() -> None:
    """One request with one round of 4, one with three rounds of 1: 7 / 4, where the mean of means would be 2.5."""
    assert acceptance_metrics.acceptance_length([make_request("a", [3]), make_request("b", [0, 0, 0])], K) == 7 / 4


def test_prefill_token_is_an_output_but_not_emitted_in_a_round() -> None:
    requests = [make_request("a", [3, 0, 2]), make_request("b", [])]
    assert acceptance_metrics.num_emitted_tokens(requests) == 8
    assert acceptance_metrics.num_output_tokens(requests) == 10
    assert acceptance_metrics.num_request_rounds(requests) == 3


def test_acceptance_rate_by_position() -> None:
    """Accepted 3, 2, 0, 1, 3 in five rounds, the last of them cut by a limit: 4 pass position 1, 3 pass 2, 2 pass 3."""
    requests = [make_request("a", [3, 2, 0]), make_request("b", [1, 3], [2, 1], truncated=True)]
    rates = acceptance_metrics.acceptance_rate_by_position(requests, K)
    assert rates["unconditional"] == [4 / 5, 3 / 5, 2 / 5]
    assert rates["conditional"] == [4 / 5, 3 / 4, 2 / 3]
    assert rates["reached"] == [5, 4, 3]


def test_unconditional_rates_add_up_to_the_acceptance_length() -> None:
    requests = MAIN.generate().requests
    rates = acceptance_metrics.acceptance_rate_by_position(requests, K)["unconditional"]
    assert 1 + sum(rate or 0.0 for rate in rates) == pytest.approx(acceptance_metrics.acceptance_length(requests, K))


def test_position_nobody_reached_has_no_conditional_rate() -> None:
    rates = acceptance_metrics.acceptance_rate_by_position([make_request("a", [0, 1])], K)
    assert rates["unconditional"] == [1 / 2, 0.0, 0.0]
    assert rates["conditional"] == [1 / 2, 0.0, None]
    assert rates["reached"] == [2, 1, 0]


def test_histograms_count_all_rounds() -> None:
    requests = [make_request("a", [3, 0, 3]), make_request("b", [2, 3], [3, 1], truncated=True)]
    assert acceptance_metrics.accepted_histogram(requests, K) == [1, 0, 1, 3]
    assert acceptance_metrics.emitted_histogram(requests, K) == [0, 2, 0, 1, 2]


def test_distance_is_a_mean_over_chosen_tokens_with_an_interval_over_requests() -> None:
    """r0 has .3 over 2 tokens and .1 over 1, r1 .8 over 3: 1.2 / 6. An infinite KL has no mean; a request, no width."""
    rounds = [make_round([2, 3], 0.1), make_round([1], 0.1)]
    rounds[0].distance, rounds[1].distance = [[0.3, 0.5], [0.8, 1.0]], [[0.1, 0.5]]
    requests = [make_request("r0", [1, 0]), make_request("r1", [2])]
    found = acceptance_metrics.distance(requests, rounds)
    assert found is not None and found["low"] is not None and found["high"] is not None
    assert found["total_variation"] == pytest.approx(0.2) and found["kl"] == pytest.approx(2 / 6)
    assert 0 <= found["low"] < 0.2 < found["high"] <= 1
    rounds[1].distance = [[0.1, math.inf]]
    one = acceptance_metrics.distance(requests[:1], rounds)
    assert one == {"total_variation": pytest.approx(0.4 / 3), "low": None, "high": None, "kl": None}
    assert acceptance_metrics.distance(requests, [make_round([2, 3], 0.1)]) is None


def test_relaxed_drafts_are_counted_of_the_requests_that_are_asked_for() -> None:
    """As a category's are, whose requests share rounds with others."""
    requests = [make_request("r0", [1, 0]), make_request("r1", [1, 0])]
    rounds = [replace(make_round([2, 2], 0.1), relaxed=[1, 1]), replace(make_round([1, 1], 0.1), relaxed=[0, 0])]
    assert acceptance_metrics.relaxed_hits(requests[1:], rounds) == {"hits": 1, "per_1000_tokens": 1000 / 3}
    assert acceptance_metrics.relaxed_hits(requests, rounds) == {"hits": 2, "per_1000_tokens": 1000 / 3}


def test_rates() -> None:
    """3 + 5 tokens in 2 ms + 2 ms of rounds; 10 + 1 tokens in all in 8 ms."""
    rounds = [make_round([2, 1], 0.002), make_round([4, 1], 0.002)]
    requests = [make_request("a", [3, 0, 2, 0]), make_request("b", [])]
    result = GenerationResult(requests, rounds, [], GraphCounts(), K, 0.008)
    assert time_metrics.decode_tokens_per_second(rounds) == pytest.approx(8 / 0.004)
    assert time_metrics.end_to_end_tokens_per_second(result) == pytest.approx(11 / 0.008)


def test_times_of_rounds_and_stages() -> None:
    """A stage counts in the rounds that could tell it apart, and is absent where none could."""
    rounds = [
        make_round([2], 0.004, {"verify": 0.003, "recur": 0.001}),
        make_round([1], 0.002, {"verify": 0.001}),
    ]
    assert time_metrics.round_ms(rounds) == pytest.approx(3.0)
    assert time_metrics.stage_ms(rounds, "verify") == pytest.approx(2.0)
    assert time_metrics.stage_ms(rounds, "recur") == pytest.approx(1.0)
    assert time_metrics.stage_ms(rounds, "catchup") is None


def test_prefill_time_is_by_request() -> None:
    prefills = [PrefillRecord("a", 3, 1, 0.001, RowCounts()), PrefillRecord("b", 900, 2, 0.005, RowCounts())]
    assert time_metrics.prefill_ms_per_request(prefills) == pytest.approx(3.0)


def test_latencies() -> None:
    """Arrived at 1 s; first token at 3 s, two tokens at 4 s, four at 7 s: seven tokens in all."""
    requests = [make_request("a", [1, 3], admitted_at=1.0, emitted_at=[3.0, 4.0, 7.0])]
    assert time_metrics.time_to_first_token_ms(requests) == [2000.0]
    assert time_metrics.time_per_output_token_ms(requests) == [4000.0 / 6]
    assert time_metrics.inter_token_latency_ms(requests) == [1000.0, 3000.0]
    assert time_metrics.end_to_end_latency_ms(requests) == [6000.0]


def test_a_single_token_has_no_time_per_output_token() -> None:
    requests = [make_request("a", [], emitted_at=[3.0])]
    assert time_metrics.time_per_output_token_ms(requests) == []
    assert time_metrics.latency([]) == {"mean": None, "p50": None, "p99": None}


def test_percentile_interpolates() -> None:
    """Rank 0.99 * 3 = 2.97 of 10, 20, 30, 40."""
    values = [40.0, 10.0, 30.0, 20.0]
    assert averages.percentile(values, 50) == 25.0
    assert averages.percentile(values, 99) == pytest.approx(39.7)
    assert averages.percentile(values, 100) == 40.0
    assert averages.percentile([7.0], 99) == 7.0
    assert time_metrics.latency(values)["mean"] == 25.0


def test_rows_add_up_over_rounds_and_prompt_passes() -> None:
    rounds = [make_round([2], 0.1, rows=RowCounts(3, 2, 8, catchup_computed=4, catchup_live=1)) for _ in range(3)]
    prefills = [PrefillRecord("a", 9, 1, 0.1, RowCounts(prefill_hidden=9, prefill_logits=1, prefill_shared=3))] * 2
    assert acceptance_metrics.rows(rounds, prefills) == {
        "drafted": 9,
        "offered": 6,
        "verified": 24,
        "catchup_computed": 12,
        "catchup_live": 3,
        "prefill_hidden": 18,
        "prefill_logits": 2,
        "prefill_shared": 6,
    }


def test_wilson_interval() -> None:
    """Newcombe 1998, table I, method 3 (no continuity correction): 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    published = [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)]
    for successes, trials, low, high in published:
        assert answer_metrics.wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)
    assert answer_metrics.wilson_interval(20, 20)[1] == 1.0


def test_accuracy_leaves_out_what_cannot_be_checked() -> None:
    found = answer_metrics.accuracy([True, None, False, True, None, True])
    assert (found["value"], found["n"]) == (0.75, 4)
    assert found["low"] is not None
    assert found["high"] is not None
    assert found["low"] < 0.75 < found["high"]
    assert answer_metrics.accuracy([None]) == {"value": None, "low": None, "high": None, "n": 0, "cut": 0}


def test_speedup_is_paired_by_repeat() -> None:
    """Repeat by repeat 1.5, 1.2, 1.6. The ratio of medians, 160 / 100, would say 1.6."""
    assert time_metrics.paired_ratio([150.0, 180.0, 160.0], [100.0, 150.0, 100.0], over="plain") == {
        "value": 1.5,
        "low": 1.2,
        "high": 1.6,
        "over": "plain",
    }
    assert time_metrics.paired_ratio([None], [100.0], over="plain") is None


def test_break_even_at_batch_one() -> None:
    """A round of 3 ms against a plain step of 2 ms: 1.5 tokens a round are needed."""
    rounds, plain = [make_round([4], 0.003), make_round([1], 0.003)], [make_round([1], 0.002)] * 5
    assert time_metrics.break_even_acceptance_length(rounds, plain) == pytest.approx(1.5)


def test_break_even_in_a_batch_shares_the_time() -> None:
    """Rounds of 4 and 2 requests, 3 ms each: 1 ms a request round; plain ones of 4, 2 ms each: 0.5 ms."""
    rounds, plain = [make_round([4, 1, 2, 1], 0.003), make_round([1, 1], 0.003)], [make_round([1] * 4, 0.002)] * 3
    assert time_metrics.break_even_acceptance_length(rounds, plain) == pytest.approx(2.0)


def test_speedup_is_length_over_break_even() -> None:
    main, plain = MAIN.generate(), PLAIN.generate()
    rates = [time_metrics.decode_tokens_per_second(result.rounds) or 0.0 for result in (main, plain)]
    length = acceptance_metrics.acceptance_length_all(main.requests) or 0.0
    break_even = time_metrics.break_even_acceptance_length(main.rounds, plain.rounds) or 0.0
    assert rates[0] / rates[1] == pytest.approx(length / break_even)


def test_median_over_repeats() -> None:
    assert averages.median_over_repeats([3.0, None, 1.0, 10.0]) == 3.0
    assert averages.median_over_repeats([None]) is None


def test_nothing_run_gives_nothing() -> None:
    assert acceptance_metrics.acceptance_length([], K) is None
    assert acceptance_metrics.acceptance_length_all([]) is None
    assert acceptance_metrics.acceptance_rate_by_position([], K)["unconditional"] == [None] * K
    assert acceptance_metrics.acceptance_rate_by_position([make_request("a", [0, 0])], 0) == {
        "unconditional": [],
        "conditional": [],
        "reached": [],
    }
    assert time_metrics.decode_tokens_per_second([]) is None
    assert time_metrics.end_to_end_tokens_per_second(GenerationResult([], [], [], GraphCounts(), K, 0.0)) is None
    assert time_metrics.round_ms([]) is None
    assert time_metrics.break_even_acceptance_length([], []) is None
    assert time_metrics.prefill_ms_per_request([]) is None


def test_every_number_of_a_summary_is_defined() -> None:
    """Containers only say whose number it is; the definition is that of the number's own key or of what holds it."""
    missing = {
        ".".join(path)
        for path in number_paths(make_summary())
        if not any(".".join(path[:end]) in DEFINITIONS for end in range(len(path), 0, -1))
    }
    assert not missing


def test_launch_ms_is_over_the_rounds_that_know_it() -> None:
    rounds = [make_round([1], 0.004), make_round([1], 0.004), make_round([1], 0.004)]
    assert time_metrics.launch_ms(rounds) is None
    rounds[0].launch_seconds, rounds[1].launch_seconds = 0.001, 0.002
    assert time_metrics.launch_ms(rounds) == pytest.approx(1.5)


def test_gpu_idle_share_is_of_the_timed_round() -> None:
    """Profiled kernels can take longer than a timed round: no share is negative."""
    assert time_metrics.gpu_idle_share(1.0, 4.0) == pytest.approx(0.75)
    assert time_metrics.gpu_idle_share(5.0, 4.0) == 0.0
    assert time_metrics.gpu_idle_share(None, 4.0) is time_metrics.gpu_idle_share(1.0, None) is None


def test_every_definition_is_one_line_and_says_something() -> None:
    for name, definition in DEFINITIONS.items():
        assert "\n" not in definition, name
        assert len(definition) > 10, name
        assert definition.endswith("."), name


def number_paths(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Keys that lead to each number, without those of containers: references, categories, repeats, lists."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ("by_category", "references"):
                for part in item.values():
                    yield from number_paths(part)
            elif key == "repeats":
                yield from number_paths(item)
            elif key not in ("config", "definitions"):
                yield from number_paths(item, (*path, key))
    elif isinstance(value, list):
        for item in value:
            yield from number_paths(item, path)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path
