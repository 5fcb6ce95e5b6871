"""Times the shapes of rounds in an engine's own slots, before any request has one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import torch

from spec_lab.engine.costs import CostTable, shortest_times, timed_shapes, timed_sizes
from spec_lab.engine.graphs.mode import GraphMode
from spec_lab.engine.parts import Parts
from spec_lab.engine.plan import LaunchShape
from spec_lab.engine.readback import read_later
from spec_lab.engine.rounds import Rounds
from spec_lab.engine.scheduler import Scheduler

SECONDS = 2.5
"""How long the rounds run in total, captures not counted."""


def tell_costs(parts: Parts, graph: GraphMode, rounds: Rounds, scheduler: Scheduler) -> None:
    """Measure the costs for a plan that needs them and has none yet."""
    if rounds.plan is not None and rounds.plan.needs_costs and rounds.plan.costs is None:
        rounds.plan.costs = measure_costs(parts, graph, rounds, scheduler)


def measure_costs(parts: Parts, graph: GraphMode, rounds: Rounds, scheduler: Scheduler) -> CostTable:
    """Time rounds of a few shapes and batch sizes, and interpolate the others.

    The slots hold tokens drawn at random, so that the rows of a round go to different experts, behind half of the
    longest sequence. All slots are free again afterwards. What the rounds leave in caches is never read.
    """
    slots, most, missed = parts.slots, rounds.most, rounds.missed
    assert not scheduler.running and missed is not None
    num_slots, device = scheduler.num_slots, slots.kv_lens.device
    num_pages = min(slots.table.pages.shape[1] - 1, scheduler.allocator.num_total // num_slots)
    pages = [scheduler.allocator.take(num_pages) for _ in range(num_slots)]
    for slot, taken in enumerate(pages):
        slots.clear(slot)
        slots.table.assign(slot, taken)
    length = min(num_pages * slots.table.page_size, scheduler.max_seq_len) // 2
    tokens = torch.randint(
        parts.target.vocab_size, slots.input_ids.shape, generator=torch.Generator().manual_seed(0)
    ).to(device)

    def timed(size: int, shape: LaunchShape) -> Callable[[], float]:
        is_full = shape.num_offered > 0 and not rounds.is_captured  # as in most rounds
        decode_round = rounds.of_shape(replace(shape, is_full=is_full))
        slot_list = list(range(min(size, num_slots)))  # a padded size may be above the number of slots
        graph.prepare(decode_round, size)

        def run() -> float:
            slots.input_ids[:num_slots] = tokens[:num_slots]
            slots.kv_lens[:num_slots] = length
            missed.counts.zero_()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            start = perf_counter()
            with parts.timer.round():
                read_later(graph.run(decode_round, slot_list, length)).read()
            return perf_counter() - start

        return run

    places = [
        (size, rounds.possible(shape, 0))
        for size in timed_sizes(num_slots, graph.padded_size)
        for shape in timed_shapes(most, rounds.makes_all)
    ]
    places = list(dict.fromkeys(places))
    seconds = shortest_times([timed(*place) for place in places], SECONDS)
    for slot, taken in reversed(list(enumerate(pages))):
        slots.clear(slot)
        missed.clear(slot)
        scheduler.allocator.give_back(taken)
    return CostTable.of(dict(zip(places, seconds, strict=True)), num_slots, most, missed.size, graph.padded_size)
