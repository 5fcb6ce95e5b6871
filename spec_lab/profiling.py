"""Kernel times of a stretch of rounds, outside the timed part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from spec_lab.core.types import Request
from spec_lab.engine.engine import Engine
from spec_lab.record.schema import Kernel

TRACE_FILE = "trace.json.gz"
STAGE_PREFIX = "stage:"
NUM_SKIPPED_ROUNDS = 2


class ProfiledRounds:
    """A `StageTimer` that profiles `num_rounds` rounds and names the stages in the trace instead of timing them."""

    def __init__(self, profiler: profile, num_skipped: int, num_rounds: int) -> None:
        self._profiler = profiler
        self._recorded = range(num_skipped, num_skipped + num_rounds)
        self._num_seen = 0

    @property
    def num_recorded(self) -> int:
        return len(range(self._recorded.start, min(self._num_seen, self._recorded.stop)))

    @contextmanager
    def round(self) -> Iterator[None]:
        index, self._num_seen = self._num_seen, self._num_seen + 1
        if index == self._recorded.start:
            self._profiler.start()
        yield
        if index == self._recorded[-1]:
            self._profiler.stop()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        with record_function(STAGE_PREFIX + name):
            yield

    def collect(self) -> dict[str, float]:
        return {}


def profile_rounds(engine: Engine, requests: list[Request], num_rounds: int, folder: Path) -> list[Kernel]:
    """Profile `num_rounds` rounds of the first full batch; keep the trace in `folder`; largest time first.

    On a CPU the rows are torch operators with their own time, on a GPU device kernels.
    """
    # While a long prompt is read, chunk by chunk, shorter ones are already decoded: those rounds are not pure.
    num_chunks = max(-(-len(request.prompt_ids) // engine.prompt_pass.chunk_size) for request in requests)
    num_skipped = NUM_SKIPPED_ROUNDS + num_chunks - 1
    on_gpu = engine.parts.slots.kv_lens.device.type == "cuda"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    profiler = profile(activities=activities)
    # A round emits K + 1 tokens at most: with so many allowed no request ends before the rounds are done, unless
    # max_new_tokens is smaller; then fewer rounds are profiled.
    num_tokens = (num_rounds + num_skipped) * (engine.num_draft_tokens + 1) + 1
    batch = [replace(r, max_new_tokens=min(num_tokens, r.max_new_tokens), ignore_eos=True) for r in requests]
    timer, engine.parts.timer = engine.parts.timer, ProfiledRounds(profiler, num_skipped, num_rounds)
    spans = engine.parts.timer
    try:
        engine.generate(batch)
    finally:
        engine.parts.timer = timer
    if spans.num_recorded == 0:
        return []
    if spans.num_recorded < num_rounds:
        profiler.stop()
    profiler.export_chrome_trace(str(folder / TRACE_FILE))
    return _kernels(profiler, spans.num_recorded, on_gpu)


def _kernels(profiler: profile, num_rounds: int, on_gpu: bool) -> list[Kernel]:
    rows = []
    for event in profiler.key_averages():
        is_kernel = event.device_type == torch.autograd.DeviceType.CUDA if on_gpu else True
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if is_kernel and not event.key.startswith(STAGE_PREFIX) and microseconds > 0:
            rows.append(
                Kernel(name=event.key, calls_per_round=event.count / num_rounds, us_per_round=microseconds / num_rounds)
            )
    return sorted(rows, key=lambda row: -row["us_per_round"])
