"""plan=cost in simulated rounds of known costs and rates: beside plain decoding and every fixed K."""

from __future__ import annotations

import random
from collections.abc import Sequence as List
from time import perf_counter

import numpy as np
import pytest

from spec_lab.core.types import Request, Sequence
from spec_lab.engine.cost_plan import CostPlan
from spec_lab.engine.costs import CostTable, timed_shapes
from spec_lab.engine.judged import ChainPositions, TreeRows
from spec_lab.engine.plan import OFF, LaunchShape

K, MISSED = 7, 32


def seconds(size: int, shape: LaunchShape, row: float, draft: float, catch_up: float) -> float:
    """A target whose rows are free up to 8 a round and then cost `row` each, in units of a plain round."""
    beyond = max(size * (shape.num_offered + 1) - 8, 0)
    drafting = catch_up + draft * shape.num_made if shape.num_made else 0.0
    return 1.0 + row * beyond + drafting


def table(size: int, **costs: float) -> CostTable:
    timed = {
        (n, shape): seconds(n, shape, **costs) for n in (1, size) for shape in timed_shapes(LaunchShape(K, K), False)
    }
    return CostTable.of(timed, size, LaunchShape(K, K), MISSED)


class Simulation:
    """A full batch of requests of equal length, one after another: a draft is accepted with its request's rate."""

    def __init__(self, batch: int, rates: List[float], costs: dict[str, float]) -> None:
        """`rates`: of the requests that follow each other in every slot."""
        self.costs, self.rates, self.batch = costs, rates, batch
        self._draw = random.Random(0)
        self.plan = CostPlan(batch, ChainPositions(K), reads_confidences=True)
        self.plan.costs = table(batch, **costs)

    def planned(self, num_tokens: int) -> float:
        """Tokens a second of the plan, if each request has `num_tokens` tokens a slot."""
        return len(self.rates) * num_tokens / sum(self._seconds(rate, num_tokens) for rate in self.rates) * self.batch

    def fixed(self, k: int) -> float:
        """Tokens a second of a fixed K, exactly."""
        tokens = [self.batch * sum(rate**count for count in range(k + 1)) for rate in self.rates]
        rounds = seconds(self.batch, LaunchShape(k, k), **self.costs)
        return len(self.rates) / sum(rounds / count for count in tokens)

    def admitted(self) -> list[Sequence]:
        requests = [Request(f"r{slot}", "x", (1,), 9) for slot in range(self.batch)]
        for slot, request in enumerate(requests):
            self.plan.admit(slot, request)
        return [Sequence(request, slot, [], 0.0, [1], num_waiting=K) for slot, request in enumerate(requests)]

    def _seconds(self, rate: float, num_tokens: int) -> float:
        sequences, spent, emitted = self.admitted(), 0.0, 0
        while emitted < num_tokens * self.batch:
            shape = self.plan.choose(sequences).shape
            num_missed = sequences[0].num_missed
            if (shape == OFF and num_missed + 1 == MISSED) or (num_missed and shape.num_offered):
                shape = LaunchShape(0, max(shape.num_made, 1))
            taken = seconds(self.batch, shape, **self.costs)
            spent += taken
            for sequence in sequences:
                emitted += self._emit(sequence, rate, min(shape.num_offered, sequence.num_waiting))
                sequence.num_waiting = shape.num_made
                sequence.num_missed = 0 if shape.num_made else num_missed + 1
            self.plan.review(sequences)
            self.plan.note(sequences, shape, taken)
        return spent * num_tokens * self.batch / emitted

    def _emit(self, sequence: Sequence, rate: float, num_offered: int) -> int:
        accepted = 0
        while accepted < num_offered and self._draw.random() < rate:
            accepted += 1
        sequence.offered_per_round.append(num_offered)
        sequence.accepted_per_round.append(accepted)
        sequence.confidence_per_round.append([])
        return accepted + 1


CHEAP, DEAR = {"row": 0.02, "draft": 0.05, "catch_up": 0.04}, {"row": 0.1, "draft": 0.2, "catch_up": 0.1}


@pytest.mark.parametrize("costs", [CHEAP, DEAR], ids=["cheap", "dear"])
@pytest.mark.parametrize("rate", [0.05, 0.6, 0.9])
@pytest.mark.parametrize("batch", [1, 8, 32])
def test_it_is_never_slower_than_plain_nor_far_behind_the_best_k(
    batch: int, rate: float, costs: dict[str, float]
) -> None:
    simulation = Simulation(batch, [rate] * (96 // batch), costs)
    got = simulation.planned(200)
    assert got > 0.97 * max(simulation.fixed(k) for k in range(K + 1))
    assert got > 0.975 * simulation.fixed(0)


def test_a_run_that_a_smaller_k_cuts_goes_on_in_the_next_round() -> None:
    """Five right drafts and a wrong one take as many rounds as begin in them; drafts that are all right leave nothing
    over; and where each is right as often as any other, tokens are those of a geometric series, nearly."""
    chain = ChainPositions(K)
    assert chain.tokens(np.array([[1.0] * 5 + [0.0] * 2])).tolist() == [1, 2, 3, 3, 3, 6, 6, 6]
    np.testing.assert_allclose(chain.tokens(np.ones((2, K))), 2 * np.arange(1, K + 2))
    for rate in (0.3, 0.6, 0.9):
        expected = np.cumsum(rate ** np.arange(K + 1))
        np.testing.assert_allclose(chain.tokens(np.full((1, K), rate)), expected, rtol=0.03)


@pytest.mark.parametrize(("row", "wrong"), [(0.1, 0.5), (0.01, 3.0)])
def test_costs_that_were_timed_wrong_are_corrected_by_rounds(row: float, wrong: float) -> None:
    """Rows that cost a third of what random tokens do, as those of experts may, or twice as much. By the timed costs
    alone the plan has .80 and .86 of the best K."""
    simulation = Simulation(16, [0.7] * 12, DEAR | {"row": row})
    simulation.plan.costs = table(16, **(DEAR | {"row": row * wrong, "draft": 0.2 * wrong}))
    assert simulation.planned(400) > 0.95 * max(simulation.fixed(k) for k in range(K + 1))


def test_among_requests_that_differ_it_is_ahead_of_every_fixed_k() -> None:
    simulation = Simulation(1, [0.9, 0.05, 0.3] * 8, DEAR)
    assert simulation.planned(300) > 1.02 * max(simulation.fixed(k) for k in range(K + 1))


@pytest.mark.parametrize(("row", "best"), [(0.0, 15), (0.04, 7), (1.0, 0)])
def test_a_tree_has_as_many_rows_as_pay(row: float, best: int) -> None:
    """Of rows that are accepted .6, .3, .15, ... of the time, two of a kind, behind a round and its drafts of 1.2."""
    chances = [0.3 * 0.6 ** (index // 2) for index in range(15)]
    plan, draw = CostPlan(1, TreeRows(16, 8)), random.Random(0)
    plan.costs = CostTable(
        verified=np.tile(1.2 + row * np.arange(16), (2, 1)),
        plain=np.ones(2),
        draft=np.zeros(2),
        timed={},
        missed_size=32,
    )
    sequence = Sequence(Request("r", "x", (1,), 9), 0, [], 0.0, [1], num_waiting=15)
    plan.admit(0, sequence.request)
    for _ in range(1000):
        count = plan.choose([sequence]).shape.num_offered
        path = [rank for rank in range(1, count + 1) if draw.random() < chances[rank - 1]][:8]
        sequence.tree_per_round.append((count + 1, path))
        sequence.confidence_per_round.append([])
        plan.review([sequence])
        plan.note([sequence], LaunchShape(count, 15), float(plan.costs.verified[1, count]))
    counts = [num_rows - 1 for num_rows, _ in sequence.tree_per_round]
    assert set(counts) <= {0, 1, 3, 7, 15}
    assert counts[100:].count(best) > 0.8 * len(counts[100:])


def test_the_table_has_what_was_timed_and_lines_between() -> None:
    costs = table(16, **DEAR)
    for (size, shape), expected in costs.timed.items():
        assert costs.seconds(size, shape) == pytest.approx(expected)
    middle = costs.seconds(16, LaunchShape(2, 1))
    assert costs.seconds(16, LaunchShape(1, 1)) < middle < costs.seconds(16, LaunchShape(4, 1))
    assert costs.seconds(8, OFF) == pytest.approx(np.interp(8, [1, 16], [costs.seconds(n, OFF) for n in (1, 16)]))


def test_a_choice_at_batch_64_takes_microseconds() -> None:
    """The shortest of many, without confidences and with: other work on the machine only adds."""
    simulation = Simulation(64, [0.6], {"row": 0.0, "draft": 0.01, "catch_up": 0.0})
    times: tuple[list[float], ...] = ([], [])
    sequences = simulation.admitted()
    for turn in range(400):
        for sequence in sequences:
            sequence.waiting_confidences = [0.9**count for count in range(1, K + 1)] if turn % 2 else None
        start = perf_counter()
        simulation.plan.choose(sequences)
        times[turn % 2].append(perf_counter() - start)
        assert simulation.plan.choose(sequences).shape == LaunchShape(K, K)
    assert min(times[0]) < 50e-6 and min(times[1]) < 100e-6
