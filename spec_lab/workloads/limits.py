"""Limits for code from outside: on its time, and in a separate process also on its memory."""

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
"""The file in which Linux gives the size of a process in pages. Without such a file, memory is not limited."""
RETURNED, RAISED = b"+", b"-"


class OutOfBounds(Exception):
    """The work raised an error, a limit ended it, or its process died; the message says which."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError inside the block after `seconds`, whatever Python code runs there.

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
    """Run `work` in a copy of this process with limits on its time and additional memory, and return its result.

    A single C operation, such as making a string of gigabytes, does not respond to signals. So the work is done in a
    process that can be ended. That process has only one of this process's threads, so `work` must be plain Python.

    Raises:
        OutOfBounds: a limit ended the work, or it raised.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a warning about locks of threads, which are not used
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
    """Do the work and end the process, without running the caller's signal handlers or exit functions."""
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
    """Return everything that is written until the other end is closed; None if that takes longer than until `end`."""
    parts: list[bytes] = []
    with selectors.DefaultSelector() as selector:
        selector.register(reading, selectors.EVENT_READ)
        while selector.select(max(0.0, end - time.monotonic())):
            part = os.read(reading, 2**16)
            if not part:
                return b"".join(parts)
            parts.append(part)
    return None
