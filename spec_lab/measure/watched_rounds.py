"""A stretch of rounds that is watched instead of timed: by the profiler, or by counters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

from spec_lab.core.types import Request
from spec_lab.engine.engine import Engine

NUM_SKIPPED_ROUNDS = 2


class WatchedRounds(ABC):
    """A `StageTimer` that watches `num_rounds` rounds after the first `num_skipped`, or fewer where a request ends.

    From the start of the first to the start of the one behind the last, so that a host that reads results a round late
    still reads once a round.

    Attributes:
        num_rounds: rounds watched so far.
        num_replays: graph replays in them.
    """

    def __init__(self, num_skipped: int, num_rounds: int) -> None:
        self.num_rounds = 0
        self.num_replays = 0
        self._watched = range(num_skipped, num_skipped + num_rounds)
        self._num_seen = 0
        self._is_watching = False

    def end(self) -> None:
        """Stop watching, if the stretch has begun."""
        if self._is_watching:
            self._is_watching = False
            self._stop()

    @contextmanager
    def round(self) -> Iterator[None]:
        if self._num_seen == self._watched.start:
            self._is_watching = True
            self._start()
        elif self._num_seen == self._watched.stop:
            self.end()
        self._num_seen += 1
        self.num_rounds += self._is_watching
        with self.span("round"):
            yield

    @abstractmethod
    def span(self, name: str) -> AbstractContextManager[None]: ...

    @contextmanager
    def capture(self) -> Iterator[list[Any]]:
        yield []

    @contextmanager
    def replay(self, name: str, marks: list[Any]) -> Iterator[None]:
        self.num_replays += self._is_watching
        with self.span(f"replay {name}"):
            yield

    def collect(self) -> dict[str, float]:
        return {}

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def _stop(self) -> None: ...


Watcher = TypeVar("Watcher", bound=WatchedRounds)


def watch_rounds(
    engine: Engine, requests: list[Request], num_rounds: int, make_watcher: Callable[[int, int], Watcher]
) -> Watcher:
    """Decode the first full batch under `make_watcher(num_skipped, num_rounds)`; the watcher, done."""
    # While a long prompt is read, chunk by chunk, shorter ones are already decoded: those rounds are not pure.
    num_chunks = max(-(-len(request.prompt_ids) // engine.prompt_pass.chunk_size) for request in requests)
    num_skipped = NUM_SKIPPED_ROUNDS + num_chunks - 1
    # A round emits K + 1 tokens at most: with so many allowed no request ends before the round behind the last one,
    # unless max_new_tokens is smaller; then fewer rounds are watched.
    num_tokens = (num_rounds + num_skipped + 1) * (engine.num_draft_tokens + 1) + 1
    batch = [replace(r, max_new_tokens=min(num_tokens, r.max_new_tokens), ignore_eos=True) for r in requests]
    watcher = make_watcher(num_skipped, num_rounds)
    timer, engine.parts.timer = engine.parts.timer, watcher
    try:
        # From the first request that ends the batch is smaller.
        engine.generate(batch, on_finish=lambda _: watcher.end())
        watcher.end()
    except BaseException:
        # The error under way is the one to be told: Ctrl-C in the middle of a start leaves nothing that can be stopped.
        with suppress(Exception):
            watcher.end()
        raise
    finally:
        engine.parts.timer = timer
    return watcher
