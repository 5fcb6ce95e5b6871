"""Rounds that the profiler or counters watch, and that are therefore not timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from spec_lab.core.types import Request
from spec_lab.engine.engine import Engine
from spec_lab.engine.timing import HostTimer

NUM_SKIPPED_ROUNDS = 2


class WatchedRounds(HostTimer):
    """A timer that watches `num_launches` launches after the first `num_skipped`, or fewer if a request ends. A
    launch may have several rounds.

    It watches from the start of the first of them to the start of the launch after the last. So reads are counted once
    a round, even if the host reads results a round late.

    Attributes:
        num_rounds: rounds watched so far; each round of a launch counts.
        num_replays: graph replays in them.
    """

    def __init__(self, num_skipped: int, num_launches: int) -> None:
        super().__init__()
        self.num_rounds = 0
        self.num_replays = 0
        self._watched = range(num_skipped, num_skipped + num_launches)
        self._num_seen = 0
        self._is_watching = False

    def end(self) -> None:
        """Stop watching, if it has begun."""
        if self._is_watching:
            self._is_watching = False
            self._stop()

    @contextmanager
    def round(self, num_rounds: int = 1) -> Iterator[None]:
        if self._num_seen == self._watched.start:
            self._is_watching = True
            self._start()
        elif self._num_seen == self._watched.stop:
            self.end()
        self._num_seen += 1
        self.num_rounds += num_rounds * self._is_watching
        with self.span("round"):
            yield

    @contextmanager
    def replay(self, name: str, marks: list[Any]) -> Iterator[None]:
        self.num_replays += self._is_watching
        with self.span(f"replay {name}"):
            yield

    def _start(self) -> None:
        """Begin to watch."""

    def _stop(self) -> None:
        """Watch no longer."""


Watcher = TypeVar("Watcher", bound=WatchedRounds)


def watch_rounds(
    engine: Engine, requests: list[Request], num_rounds: int, make_watcher: Callable[[int, int], Watcher]
) -> Watcher:
    """Decode `requests`, a full batch, with the watcher of `make_watcher(num_skipped, num_launches)`, and return the
    watcher."""
    rounds_per_launch = engine.graph.rounds_per_replay
    num_launches = -(-num_rounds // rounds_per_launch)
    # Until the last chunk of the longest prompt, rounds of shorter prompts alternate with chunks, so they are skipped.
    num_chunks = max(-(-len(request.prompt_ids) // engine.prompt_pass.chunk_size) for request in requests)
    num_skipped = -(-NUM_SKIPPED_ROUNDS // rounds_per_launch) + num_chunks - 1
    # With this many tokens no request ends before the watched launches do, even if each round emits K + 1. If
    # max_new_tokens is smaller, fewer launches are watched.
    most_emitted = rounds_per_launch * (engine.num_draft_tokens + 1)
    num_tokens = (num_launches + num_skipped + 1) * most_emitted + 1
    batch = [replace(r, max_new_tokens=min(num_tokens, r.max_new_tokens), ignore_eos=True) for r in requests]
    watcher = make_watcher(num_skipped, num_launches)
    timer, engine.parts.timer = engine.parts.timer, watcher
    try:
        # The batch is smaller once a request has ended, so watching ends with the first one.
        engine.generate(batch, on_finish=lambda _: watcher.end())
    finally:
        engine.parts.timer = timer
        watcher.end()
    return watcher
