"""Profiles kernels, launches and synchronisations of some rounds, outside the timed passes."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.autograd.profiler import profile, record_function

from spec_lab.core.types import Request
from spec_lab.engine.engine import Engine
from spec_lab.measure.launch_counts import CountedRounds, Work, count_trace
from spec_lab.measure.watched_rounds import WatchedRounds, watch_rounds
from spec_lab.record.trace import STAGE_PREFIX, TRACE_FILE, Kernel, TraceEvent


@dataclass(frozen=True, slots=True)
class RoundProfile:
    """The results of profiled rounds: `kernels` by time, largest first, and `work`; empty if no round was profiled."""

    kernels: list[Kernel]
    work: Work


class ProfiledRounds(WatchedRounds):
    """Names stages and replays in the profiler's trace."""

    def __init__(self, profiler: profile, num_skipped: int, num_launches: int) -> None:
        super().__init__(num_skipped, num_launches)
        self._profiler = profiler

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        with record_function(STAGE_PREFIX + name):
            yield

    def _start(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # so that kernels of the round before are not in the trace
        self._profiler.__enter__()

    def _stop(self) -> None:
        self._profiler.__exit__(None, None, None)


def profile_rounds(engine: Engine, requests: list[Request], num_rounds: int, folder: Path) -> RoundProfile:
    """Profile `num_rounds` rounds of a full batch, rounded up to whole launches, and keep the trace in `folder`. If a
    request ends earlier, fewer rounds are profiled.

    On a CPU the kernels are torch operators. The time of one leaves out the operators that it calls. Launches are
    counted in a separate pass.
    """
    if num_rounds == 0:
        return RoundProfile([], {})
    on_gpu = engine.parts.slots.kv_lens.device.type == "cuda"
    # The one of torch.profiler imports torch's compiler when it starts, which takes over a second.
    profiler = profile(use_device="cuda" if on_gpu else None, use_kineto=True)
    watched = watch_rounds(engine, requests, num_rounds, lambda *stretch: ProfiledRounds(profiler, *stretch))
    if watched.num_rounds == 0:
        return RoundProfile([], {})
    with TemporaryDirectory() as scratch:
        plain = Path(scratch) / "trace.json"
        profiler.export_chrome_trace(str(plain))
        (folder / TRACE_FILE).write_bytes(gzip.compress(plain.read_bytes()))
    kernels = _kernels(profiler, watched.num_rounds, on_gpu)
    if on_gpu:
        return RoundProfile(kernels, count_trace(read_trace(profiler), watched.num_rounds, watched.num_replays))
    return RoundProfile(kernels, watch_rounds(engine, requests, num_rounds, CountedRounds).work())


def read_trace(profiler: profile) -> list[TraceEvent]:
    """Return every event of a profiler that has stopped."""
    return [
        TraceEvent(
            name=event.name,
            start_us=event.time_range.start,
            end_us=event.time_range.end,
            on_device=event.device_type == torch.autograd.DeviceType.CUDA,
            is_span=event.name.startswith(STAGE_PREFIX),
        )
        for event in profiler.function_events
    ]


def _kernels(profiler: profile, num_rounds: int, on_gpu: bool) -> list[Kernel]:
    rows = []
    for event in profiler.key_averages():
        is_kernel = event.device_type == torch.autograd.DeviceType.CUDA if on_gpu else True
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if is_kernel and not event.key.startswith(STAGE_PREFIX) and microseconds > 0:
            rows.append(Kernel(event.key, event.count / num_rounds, microseconds / num_rounds))
    return sorted(rows, key=lambda row: -row.us_per_round)
