"""One command runs a sweep: two that share a folder would each run every job.

The lock is taken alone and then shared with the workers of a launcher, which may outlive the command: as long as one of
them runs a job, nobody can take it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from spec_lab.core.errors import UserError
from spec_lab.core.regular import without_waiting
from spec_lab.record.sinks import SWEEP_FILE

LOCK_FILE = ".lock"
MARKS = (LOCK_FILE, "multirun.yaml", "proposals.json")
"""A folder with one of these files is that of a sweep, which has the lock as long as it runs."""
SWEEP_IS_HELD = "is a sweep that another process is running; wait for it, or set another name=..."


def is_sweep(folder: Path) -> bool:
    """Tell whether the folder is that of a sweep, which ends."""
    return any((folder / mark).exists() for mark in (*MARKS, SWEEP_FILE))


def was_left(folder: Path) -> bool:
    """Tell whether the sweep in `folder` began, and neither runs nor has come to its end."""
    # In this order: a sweep says that it has ended before it gives the lock back.
    return is_sweep(folder) and not _is_held(folder / LOCK_FILE) and not (folder / SWEEP_FILE).exists()


def _is_held(path: Path) -> bool:
    """Tell whether a process has the lock; a file on a system without locks is taken for one that is held."""
    try:
        with os.fdopen(without_waiting(path)) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # who runs shares it with its workers
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


class SweepLock:
    """A lock on a sweep's folder, held from `take` to `release`. The system gives it back where the process ends."""

    def __init__(self, folder: Path, held: str = SWEEP_IS_HELD) -> None:
        """Name the folder, and what is said of it where another process has the lock."""
        self._path, self._held = folder / LOCK_FILE, held
        self._file: TextIO | None = None

    def take(self) -> None:
        """Take the lock; the folder must exist.

        Raises:
            UserError: another process has it.
        """
        while not self._is_taken():
            pass

    def _is_taken(self) -> bool:
        """Tell whether the locked file is the one that stands there: its last holder may just have removed it."""
        file = os.fdopen(without_waiting(self._path, os.O_WRONLY | os.O_CREAT), "w")
        if not (_lock(file, fcntl.LOCK_EX) and _lock(file, fcntl.LOCK_SH)):
            file.close()
            raise UserError(f"{self._path.parent} {self._held}")
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                self._file = file
                return True
        file.close()
        return False

    def release(self) -> None:
        """Give the lock back; remove its file, unless a worker has it still. Nothing happens where it was not taken."""
        if self._file is not None:
            if _lock(self._file, fcntl.LOCK_EX):
                self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold the lock of an output folder, whose files two processes would write over one another.

    Raises:
        UserError: another process has it.
    """
    lock = SweepLock(folder, "is what another process is writing; wait for it, or choose another output_dir")
    lock.take()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def sharing_lock(folder: Path) -> Iterator[None]:
    """Shares the lock of the sweep in `folder` while a worker runs one of its jobs."""
    file = None
    with suppress(OSError):  # there is none in a dry run
        file = os.fdopen(without_waiting(folder / LOCK_FILE))
        _lock(file, fcntl.LOCK_SH)
    try:
        yield
    finally:
        if file is not None:
            file.close()


def _lock(file: TextIO, kind: int) -> bool:
    """Tell whether nobody stands in the way of a lock of this kind, which is then held."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks, where nothing can be known
    return True
