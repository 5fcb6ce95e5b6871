"""The peak memory of a run: of its process, and of its GPU."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
NOW, PEAK = "VmRSS", "VmHWM"
FORGET_PEAK = "5"
"""Writing this to `FORGET` resets the peak that the system reports. Otherwise earlier runs of the same process would
count."""


@dataclass(frozen=True, slots=True)
class MemoryWatch:
    """Remembers the memory of the process at the start of a run.

    Attributes:
        start: bytes then, which include imports but nothing of the run.
    """

    start: int

    @classmethod
    def begin(cls) -> MemoryWatch:
        """Begin to watch, before anything is loaded."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        if FORGET.exists():
            FORGET.write_text(FORGET_PEAK)
        return cls(_resident(NOW))

    def read(self, device: torch.device) -> dict[str, float | None]:
        """Return the peaks up to now."""
        on_gpu = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        return {"start_rss_bytes": self.start, "peak_rss_bytes": _resident(PEAK), "peak_cuda_bytes": on_gpu}


def _resident(field: str) -> int:
    """Return the bytes of the process in memory, now or at the peak (`field`). On systems other than Linux, always the
    peak."""
    if STATUS.exists():
        found = [line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:")]
        if found:
            return 1024 * int(found[0].split()[1])
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most
