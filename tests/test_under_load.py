"""Many requests of random lengths and stops through one engine: nothing is lost, leaked or mixed up on the way."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

from spec_lab.core.results import RequestRecord
from spec_lab.core.types import FinishReason, Request, Sequence
from spec_lab.engine.engine import Engine
from tests.fake_target import FakeTarget, ScriptedDrafter, make_fake_engine

K = 3
PAGE_SIZE = 4
LONGEST_PROMPT, MOST_NEW_TOKENS = 20, 28
MAX_SEQ_LEN = LONGEST_PROMPT + MOST_NEW_TOKENS
SCRIPT = (3, 0, 1, 2, 0, 3)
NUM_REQUESTS, BATCH_SIZE = 100, 16


def make_requests(count: int, seed: int = 0) -> list[Request]:
    """Random prompts and limits; some requests decode on past the end of sequence."""
    draw = random.Random(seed)
    return [
        Request(
            f"r{number:04d}",
            "load",
            tuple(draw.randrange(3, 31) for _ in range(draw.randint(1, LONGEST_PROMPT))),
            draw.randint(1, MOST_NEW_TOKENS),
            ignore_eos=draw.random() < 0.2,
        )
        for number in range(count)
    ]


def make_engine(num_slots: int, num_pages: int | None = None) -> tuple[Engine, FakeTarget]:
    return make_fake_engine(
        lambda target: ScriptedDrafter(K, target, SCRIPT),
        num_slots=num_slots,
        max_seq_len=MAX_SEQ_LEN,
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        prefill_chunk=8,
        vocab_size=31,
    )


class Bookkeeping:
    """Counts slots and pages whenever a request finishes; `most_running` is the most requests that ran together."""

    def __init__(self, engine: Engine, target: FakeTarget) -> None:
        self._engine = engine
        self._target = target
        self.finished: list[str] = []
        self.most_running = 0
        self.most_sequences = 0

    def __call__(self, record: RequestRecord) -> None:
        scheduler = self._engine.scheduler
        held = [page for sequence in scheduler.running for page in sequence.pages]
        slots = [sequence.slot for sequence in scheduler.running]
        assert sorted([*scheduler.free_slots, *slots]) == list(range(scheduler.num_slots))
        assert len(held) == len(set(held))
        assert len(held) + scheduler.allocator.num_free == scheduler.allocator.num_total
        self.finished.append(record.request_id)
        self.most_running = max(self.most_running, len(slots))
        forget(self._target)
        if len(self.finished) % 100 == 0:
            self.most_sequences = max(self.most_sequences, sum(type(one) is Sequence for one in gc.get_objects()))


def forget(target: FakeTarget) -> None:
    """Drop what the fake target keeps of every call, for other tests, so that only the engine's memory is looked at."""
    for kept in (target.forward_rows, target.kept_rows, target.logit_rows, target.attention):
        kept.clear()


def assert_all_given_back(engine: Engine) -> None:
    scheduler = engine.scheduler
    assert scheduler.running == []
    assert not scheduler.has_work
    assert sorted(scheduler.free_slots) == list(range(scheduler.num_slots))
    free = scheduler.allocator.take(scheduler.allocator.num_free)
    assert len(set(free)) == len(free) == scheduler.allocator.num_total, "each page once"
    scheduler.allocator.give_back(free)


def test_all_requests_end_with_their_own_outputs_and_nothing_is_leaked() -> None:
    requests = make_requests(NUM_REQUESTS)
    engine, target = make_engine(BATCH_SIZE)
    count = Bookkeeping(engine, target)
    records = engine.generate(requests, on_finish=count).requests
    assert sorted(count.finished) == [record.request_id for record in records] == [r.request_id for r in requests]
    assert count.most_running >= BATCH_SIZE - 1, "the batch was full"
    assert count.most_sequences <= BATCH_SIZE + 1
    assert_all_given_back(engine)
    assert {record.finish_reason for record in records} == {FinishReason.EOS, FinishReason.LENGTH}
    assert [record.output_ids for record in records] == [target.expected(request) for request in requests]


def test_memory_is_flat_from_wave_to_wave() -> None:
    """What the second wave leaves behind, the fourth does too: nothing grows with the number of requests served."""
    engine, target = make_engine(BATCH_SIZE)
    objects, kept = [], []
    with traced_memory():
        for wave in range(4):
            engine.generate(make_requests(NUM_REQUESTS // 4, seed=wave), on_finish=Bookkeeping(engine, target))
            forget(target)
            gc.collect()
            objects.append(len(gc.get_objects()))
            kept.append(tracemalloc.get_traced_memory()[0])
    assert objects[3] - objects[1] < 10, "one object a request would be many more"
    assert kept[3] - kept[1] < 2**16, f"{kept}: what torch keeps for its tensors, and no more"


@contextmanager
def traced_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
