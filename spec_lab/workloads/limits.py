"""Limits on what code of others may take: time, and in a process of its own memory too."""

from __future__ import annotations

import os
import resource
import selectors
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from spec_lab.core.errors import describe_error

SIZES = Path("/proc/self/statm")
"""Linux says there how large a process is, in pages. Where there is no such file, memory is not limited."""
RETURNED, RAISED = b"+", b"-"


class OutOfBounds(Exception):
    """Says what the work raised, or which limit ended it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError inside the block once `seconds` are over, whatever Python runs there.

    Python runs signal handlers in the main thread only: a block in another thread has no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signal_number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it takes longer than {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, remaining, interval)
        signal.signal(signal.SIGALRM, before)


def within_limits(work: Callable[[], str], seconds: float, num_bytes: int) -> str:
    """Return what `work` returns in a copy of this process that may take so long, and so much more memory.

    One operation of C, such as a string of gigabytes, hears no signal; the end of its process ends it. The copy is
    for plain Python: of the threads of this process, it has one.

    Raises:
        OutOfBounds: a limit ended the work, or it raised.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads, whose locks the work takes not
        child = os.fork()
    if child == 0:
        _work_and_leave(work, writing, num_bytes)
    os.close(writing)
    try:
        said = _read_until(reading, time.monotonic() + seconds)
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if said is None:
        raise OutOfBounds(f"it takes longer than {seconds:g} seconds")
    kind, text = said[:1], said[1:].decode("utf-8", "surrogatepass")
    if kind == RETURNED:
        return text
    raise OutOfBounds(text if kind == RAISED else f"its process died; it may take {num_bytes // 2**20} MiB")


def _work_and_leave(work: Callable[[], str], writing: int, num_bytes: int) -> NoReturn:
    """Nothing of the caller's may run here: neither its handlers nor what is left to do at its end."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        _limit_memory(num_bytes)
        try:
            said = RETURNED + work().encode("utf-8", "surrogatepass")
        except MemoryError:
            said = RAISED + f"it takes more than {num_bytes // 2**20} MiB of memory".encode()
        except Exception as error:
            said = RAISED + describe_error(error).encode("utf-8", "surrogatepass")
        while said:
            said = said[os.write(writing, said) :]
    finally:
        os._exit(0)


def _limit_memory(num_bytes: int) -> None:
    if SIZES.exists():
        now = int(SIZES.read_text().split()[0]) * resource.getpagesize()
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = now + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def _read_until(reading: int, end: float) -> bytes | None:
    """Return all that comes before the other end is closed; None where that is not before `end`."""
    parts: list[bytes] = []
    with selectors.DefaultSelector() as selector:
        selector.register(reading, selectors.EVENT_READ)
        while selector.select(max(0.0, end - time.monotonic())):
            part = os.read(reading, 2**16)
            if not part:
                return b"".join(parts)
            parts.append(part)
    return None
