"""Every number, from results made by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from spec_lab.core.results import GenerationResult, GraphCounts, PrefillRecord, RequestRecord, RowCounts
from spec_lab.record import acceptance, answers, times
from spec_lab.record.draft_counts import acceptance_length, draft_counts
from spec_lab.record.metric import METRICS, Measured, flattened, part_of
from spec_lab.record.models import Request
from spec_lab.record.recorder import request_row
from spec_lab.record.statistics import (
    Interval,
    bootstrapped,
    mean_ratio,
    paired_difference_interval,
    ratios_of_turns,
    wilson_interval,
)
from spec_lab.record.summary import definitions
from tests.fake_runs import MAIN, make_request, make_round, make_run

K = 3


def measured(requests: Sequence[RequestRecord], rounds: Sequence[Any] = (), **changes: Any) -> Measured:
    """What one turn over these requests and rounds makes."""
    result = GenerationResult(list(requests), list(rounds), [], GraphCounts(), K, 1.0)
    return Measured([request_row(record) for record in requests], [result], K, **changes)


def turn(requests: Sequence[RequestRecord] = (), rounds: Sequence[Any] = (), seconds: float = 1.0, **more: Any) -> Any:
    return replace(GenerationResult(list(requests), list(rounds), [], GraphCounts(), K, seconds), **more)


def test_acceptance_length_is_pooled_not_averaged_over_requests() -> None:
    """One request with one round of 4, one with three rounds of 1: 7 / 4, where the mean of means would be 2.5."""
    assert acceptance_length([make_request("a", [3]), make_request("b", [0, 0, 0])], K) == 7 / 4


def test_the_prompt_pass_token_is_an_output_but_not_emitted_in_a_round() -> None:
    part = part_of(measured([make_request("a", [3, 0, 2]), make_request("b", [])]))
    counted = [part[name] for name in ("emitted_tokens", "output_tokens", "rounds", "num_requests", "prompt_tokens")]
    assert counted == [8, 10, 3, 2, 6]


def test_a_category_has_its_share_of_the_time_of_rounds() -> None:
    """r0 emits 2 + 3 tokens in half of the first round and all of the second, r1 one token in the other half."""
    requests = [make_request("r0", [1, 2], category="code"), make_request("r1", [0], category="prose")]
    part = part_of(measured(requests, [make_round([2, 1], 0.1), make_round([3], 0.2)]))
    assert part["batch_tokens_per_second"] == pytest.approx(6 / 0.3)
    rates = {name: numbers["batch_tokens_per_second"] for name, numbers in part.by_category.items()}
    assert rates == {"code": pytest.approx(5 / 0.25), "prose": pytest.approx(1 / 0.05)}


def test_acceptance_by_position() -> None:
    """Accepted 3, 2, 0, 1, 3 in five rounds, the last of them cut by a limit: 4 pass position 1, 3 pass 2, 2 pass 3."""
    part = part_of(measured([make_request("a", [3, 2, 0]), make_request("b", [1, 3], [2, 1], truncated=True)]))
    rates = [part.under(f"acceptance_rate_by_position.{kind}") for kind in ("unconditional", "conditional", "reached")]
    assert rates == [
        {"1": 4 / 5, "2": 3 / 5, "3": 2 / 5},
        {"1": 4 / 5, "2": 3 / 4, "3": 2 / 3},
        {"1": 5, "2": 4, "3": 3},
    ]
    assert part["acceptance_length"] == pytest.approx(1 + 9 / 5)
    assert part.under("accepted_histogram") == {"0": 1, "1": 1, "2": 1, "3": 2}
    assert part.under("emitted_histogram") == {"0": 0, "1": 2, "2": 1, "3": 1, "4": 1}


def test_a_position_nobody_reached_has_no_conditional_rate() -> None:
    rates = draft_counts([make_request("a", [0, 1])], K)
    assert (rates.unconditional, rates.conditional, rates.offered) == ([0.5, 0.0, 0.0], [0.5, 0.0, None], [2, 1, 0])


def test_an_engine_that_tells_a_histogram_or_nothing_has_what_follows_from_it() -> None:
    """Three rounds of three offers, of which 3, 3 and 1 were accepted: (4 + 4 + 2) / 3."""
    told = Request(id="a", prompt_ids=[1], output_ids=[2], rounds_histogram=[(3, 3, 2), (3, 1, 1)])
    silent = Request(id="b", prompt_ids=[1], output_ids=[2])
    part = part_of(Measured([told, silent], [turn()], K))
    assert (part["acceptance_length"], part["rounds"]) == (pytest.approx(10 / 3), 3)
    assert part_of(Measured([silent], [turn()], K))["acceptance_length"] is None
    assert part["round_ms"] is part["speedup"] is None and part["output_tokens"] == 2


def test_acceptance_is_told_by_context_turn_and_phase() -> None:
    """Prompts of 3 tokens. Rounds begin at output tokens 1, 5, 6 (4, 8 and 9 tokens of text), and at 1 in turn 2."""
    first = request_row(make_request("a", [3, 0, 2]), thinking_spans=[(0, 6)])
    second = request_row(replace(make_request("b", [1]), turn=2), thinking_spans=[])
    part = part_of(Measured([first, second], [turn()], K))
    assert part.under("acceptance_length_by.context") == {"4": (4 + 2) / 2, "8": (1 + 3) / 2}
    assert part.under("acceptance_length_by.turn") == {"1": 8 / 3, "2": 2.0}
    assert part.under("acceptance_length_by.phase") == {"answer": (3 + 2) / 2, "thinking": (4 + 1) / 2}


def test_distance_is_a_mean_over_chosen_tokens_with_an_interval_over_requests() -> None:
    """r0 has .3 over 2 tokens and .1 over 1, r1 .8 over 3: 1.2 / 6. An infinite KL has no mean; a request, no width."""
    rounds = [make_round([2, 3], 0.1), make_round([1], 0.1)]
    rounds[0].distance, rounds[1].distance = [[0.3, 0.5], [0.8, 1.0]], [[0.1, 0.5]]
    requests = [make_request("r0", [1, 0]), make_request("r1", [2])]
    found = part_of(measured(requests, rounds)).under("distance")
    assert found["total_variation"] == pytest.approx(0.2) and found["kl"] == pytest.approx(2 / 6)
    assert 0 <= found["low"] < 0.2 < found["high"] <= 1
    rounds[1].distance = [[0.1, math.inf]]
    one = part_of(measured(requests[:1], rounds)).under("distance")
    assert one == {"total_variation": pytest.approx(0.4 / 3), "low": None, "high": None, "kl": None}


def test_relaxed_drafts_are_counted_of_the_requests_of_a_category() -> None:
    requests = [make_request("r0", [1, 0], category="a"), make_request("r1", [1, 0], category="b")]
    rounds = [replace(make_round([2, 2], 0.1), relaxed=[1, 1]), replace(make_round([1, 1], 0.1), relaxed=[0, 0])]
    part = part_of(measured(requests, rounds))
    assert part.under("relaxed") == {"hits": 2, "per_1000_tokens": 1000 / 3}
    assert {name: numbers["relaxed.hits"] for name, numbers in part.by_category.items()} == {"a": 1, "b": 1}


def test_rates() -> None:
    """3 + 5 tokens in 2 ms + 2 ms of rounds; 10 + 1 output and 6 prompt tokens of two requests in 8 ms."""
    requests = [make_request("a", [3, 0, 2, 0]), make_request("b", [])]
    result = turn(requests, [make_round([2, 1], 0.002), make_round([4, 1], 0.002)], 0.008)
    assert times.decode_tokens_per_second(result) == pytest.approx(8 / 0.004)
    assert times.end_to_end_tokens_per_second(result) == pytest.approx(11 / 0.008)
    assert times.total_tokens_per_second(result) == pytest.approx(17 / 0.008)
    assert times.requests_per_second(result) == pytest.approx(2 / 0.008)


def test_times_of_rounds_and_stages() -> None:
    """A stage counts in the rounds that could tell it apart, and is absent where none could."""
    rounds = [make_round([2], 0.004, {"verify": 0.003, "own": 0.001}), make_round([1], 0.002, {"verify": 0.001})]
    rounds[0].launch_seconds = 0.001
    part = part_of(Measured((), [turn(rounds=rounds)], K))
    assert (part["round_ms"], part["launch_ms"]) == (pytest.approx(3.0), pytest.approx(1.0))
    stages = part.under("stage_ms_per_round")
    assert (stages["verify"], stages["own"], stages["catchup"]) == (pytest.approx(2.0), pytest.approx(1.0), None)


def test_prompts_have_a_time_a_request_and_a_rate() -> None:
    prefills = [PrefillRecord("a", 3, 1, 0.001, RowCounts()), PrefillRecord("b", 900, 2, 0.005, RowCounts())]
    result = turn(prefills=prefills)
    assert times.prefill_ms_per_request(result) == pytest.approx(3.0)
    assert times.prompt_tokens_per_second(result) == pytest.approx(903 / 0.006)


def test_latencies_count_from_arrival() -> None:
    """Arrived at 1 s, admitted at 2 s; first token at 3 s, two tokens at 4 s, four at 7 s: seven tokens in all."""
    waited = replace(make_request("a", [1, 3], admitted_at=2.0, emitted_at=[3.0, 4.0, 7.0]), arrived_at=1.0)
    part = part_of(Measured((), [turn([waited], seconds=8.0)], K))
    means = {name: part[f"latency_ms.{name}.mean"] for name in ("ttft", "tpot", "itl", "e2e")}
    assert means == {"ttft": 2000.0, "tpot": 4000.0 / 6, "itl": 2000.0, "e2e": 6000.0}
    assert part["latency_ms.itl.p99"] == pytest.approx(2980.0) and part["latency_ms.itl.p50"] == 2000.0
    assert part["requests_in_flight"] == pytest.approx(6 / 8)


def test_a_single_token_has_no_time_per_output_token() -> None:
    part = part_of(Measured((), [turn([make_request("a", [], emitted_at=[3.0])])], K))
    assert part["latency_ms.tpot.mean"] is part["latency_ms.itl.p99"] is None


def test_rows_add_up_over_rounds_and_prompt_passes() -> None:
    counts = RowCounts(3, 2, 8, catchup_attention=4, catchup_output=1, catchup_mlp=1, catchup_live=1)
    rounds = [make_round([2], 0.1, rows=counts) for _ in range(3)]
    prefills = [PrefillRecord("a", 9, 1, 0.1, RowCounts(prefill_computed=1, prefill_hidden=9, prefill_logits=1))] * 2
    part = part_of(Measured((), [turn(rounds=rounds, prefills=prefills)], K))
    expected = {"drafted": 9, "offered": 6, "verified": 24, "catchup_attention": 12, "catchup_output": 3}
    expected |= {"catchup_mlp": 3, "catchup_live": 3, "prefill_computed": 2, "prefill_hidden": 18, "prefill_logits": 2}
    assert part.under("rows") == expected | {"prefill_shared": 0}


def test_accuracy_leaves_out_what_cannot_be_checked_and_pairs_by_prompt() -> None:
    mine, plain = (
        [Request(id=f"r{n}", prompt_ids=[1], output_ids=[2], correct=told) for n, told in enumerate(each)]
        for each in ([True, None, False, True, None, True], [True, True, True, None, None, False])
    )
    found = part_of(Measured(mine, [turn()], K, {"plain": Measured(plain, [turn()])}))
    assert (found["accuracy"], found["accuracy.n"]) == (0.75, 4)
    assert found["accuracy.low"] < 0.75 < found["accuracy.high"]
    change = found.under("accuracy_change")
    assert (change["lost"], change["gained"], change["n"]) == (1, 1, 3) and found["accuracy_change"] == 0
    assert answers.accuracy(Measured(plain[4:5]))["value"] is None


def test_speedup_is_paired_by_repeat() -> None:
    """Repeat by repeat 1.5, 1.2, 1.6. The ratio of medians, 160 / 100, would say 1.6."""

    def turns(*rates: float) -> list[Any]:
        return [turn(rounds=[make_round([1], 1 / rate)]) for rate in rates]

    plain = Measured((), turns(100.0, 150.0, 100.0))
    part = part_of(Measured((), turns(150.0, 180.0, 160.0), K, {"plain": plain}))
    assert [part[f"speedup{end}"] for end in ("", ".low", ".high")] == pytest.approx([1.5, 1.2, 1.6])
    assert part["speedup.mean_low"] < part["speedup.mean"] == pytest.approx((1.5 * 1.2 * 1.6) ** (1 / 3))


@pytest.mark.parametrize(
    ("rounds", "plain", "expected"),
    [
        ([([4], 0.003), ([1], 0.003)], [([1], 0.002)] * 5, 1.5),
        ([([4, 1, 2, 1], 0.003), ([1, 1], 0.003)], [([1] * 4, 0.002)] * 3, 2.0),
    ],
    ids=["a round of 3 ms, a plain step of 2 ms", "in a batch requests share the time"],
)
def test_break_even(rounds: Any, plain: Any, expected: float) -> None:
    mine, other = ([turn(rounds=[make_round(*each) for each in side])] for side in (rounds, plain))
    found = times.break_even_acceptance_length(Measured((), mine, K, {"plain": Measured((), other)}))
    assert found == pytest.approx(expected)


def test_gpu_idle_share_is_of_the_timed_round() -> None:
    """Profiled kernels can take longer than a timed round: no share is negative."""
    timed = [turn(rounds=[make_round([1], 0.004)])]
    for busy, share in ((1.0, 0.75), (5.0, 0.0), (None, None)):
        assert times.gpu_idle_share(Measured((), timed, K, work={"gpu_busy_ms_per_round": busy})) == share


def test_every_number_of_a_run_has_a_definition_of_a_line() -> None:
    known, run = definitions(), make_run()
    for part in run.parts.values():
        for name in part.metrics:
            assert any(name == metric or name.startswith(f"{metric}.") for metric in METRICS), name
    for name, text in known.items():
        assert "\n" not in text and len(text) > 10, name


def test_what_a_metric_returns_is_flattened() -> None:
    found = dict(flattened("a", {"value": 1, "low": math.inf, "by": {"x": [2, None]}}))
    assert found == {"a": 1, "a.low": None, "a.by.x.1": 2, "a.by.x.2": None}


def test_wilson_interval() -> None:
    """Newcombe 1998, table I, method 3 (no continuity correction): 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    published = [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)]
    for successes, trials, low, high in published:
        assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)


def test_a_paired_difference_has_a_width_even_where_no_pair_differs() -> None:
    low, high = paired_difference_interval(0, 0, 20)
    assert low == -high < 0
    low, high = paired_difference_interval(1, 9, 40)
    assert 0 < low < 8 / 40 < high


def test_the_ratio_of_turns_has_students_interval() -> None:
    """Logs 0, .1 and .2: mean .1, standard error .1 / sqrt 3, t quantile of two degrees 4.3027."""
    ratios = ratios_of_turns([math.exp(x) for x in (0.0, 0.1, 0.2)], [1.0] * 3)
    reach, found = 4.3027 * 0.1 / math.sqrt(3), mean_ratio(ratios)
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx(
        tuple(map(math.exp, (0.1, 0.1 - reach, 0.1 + reach))), rel=1e-4
    )
    few = ratios_of_turns([2.0, None, 2.1], [1.0, 1.0, 1.0])
    assert few == [2.0, 2.1] and mean_ratio(few, ratios) == Interval(
        pytest.approx(math.sqrt(4.2) / math.exp(0.1)), None, None
    )
    assert ratios_of_turns([None, 1.0], [1.0, 0.0]) == [] and mean_ratio([]) is mean_ratio(few, []) is None
    apart = mean_ratio(ratios, ratios)
    assert apart is not None and apart.value == 1.0 and apart.holds(1.0) and not Interval(2.0, 1.5, 2.5).holds(1.0)


def test_the_bootstrap_of_prompts_covers_what_it_should() -> None:
    """The percentile interval of a mean of 60 fair coins is about .5 +- .13; the same numbers resampled together do not
    differ, and resampled apart they do."""
    import numpy as np

    coins = np.tile([0.0, 1.0], 30)
    mean = bootstrapped(lambda picks: coins[picks].mean(axis=-1), 60)
    assert mean is not None and mean.low is not None and mean.high is not None
    assert (mean.value, mean.low, mean.high) == (0.5, pytest.approx(0.37, abs=0.02), pytest.approx(0.63, abs=0.02))
    paired = bootstrapped(lambda picks: coins[picks].mean(axis=-1) - coins[picks].mean(axis=-1), 60)
    apart = bootstrapped(lambda a, b: coins[a].mean(axis=-1) - coins[b].mean(axis=-1), 60, 60)
    assert paired == Interval(0.0, 0.0, 0.0) and apart is not None and apart.low is not None and apart.low < -0.1
    assert bootstrapped(lambda picks: coins[picks].mean(axis=-1), 1) == Interval(0.0, None, None)


def test_the_bootstrap_counts_drafts_as_the_definition_does() -> None:
    requests = [request_row(record) for record in MAIN.generate().requests]
    found = acceptance.acceptance_length(Measured(requests, (), K))
    assert found is not None and found["low"] is not None and found["high"] is not None
    assert found["value"] == acceptance_length(requests, K)
    assert found["low"] < found["value"] < found["high"]
