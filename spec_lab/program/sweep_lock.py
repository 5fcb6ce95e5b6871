"""The lock that lets only one command run a sweep. Two commands in the same folder would each run every job.

The command first takes the lock exclusively, and then shares it with the workers of a launcher. These may outlive the
command. No other command can take the lock while one of them runs a job.
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

SWEEP_FILE = "sweep.json"
LOCK_FILE = ".lock"
MARKS = (LOCK_FILE, "multirun.yaml", "proposals.json")
"""A folder with one of these files is taken for that of a sweep."""
SWEEP_IS_HELD = "is a sweep that another process is running; wait for it, or set another name=..."


def is_sweep(folder: Path) -> bool:
    """Return whether the folder belongs to a sweep."""
    return any((folder / mark).exists() for mark in (*MARKS, SWEEP_FILE))


def was_left(folder: Path) -> bool:
    """Return whether the sweep in `folder` was interrupted: it has begun, does not run, and has not ended."""
    # The lock is checked first, since a sweep records its end before it releases the lock.
    return is_sweep(folder) and not _is_held(folder / LOCK_FILE) and not (folder / SWEEP_FILE).exists()


def _is_held(path: Path) -> bool:
    """Return whether a process holds the lock; true if this cannot be known, as on a file system without locks."""
    try:
        with os.fdopen(without_waiting(path)) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a running sweep holds it shared
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


class SweepLock:
    """A lock on the folder of a sweep or of other output, held from `take` to `release`. The system releases it when
    the process ends."""

    def __init__(self, folder: Path, held: str = SWEEP_IS_HELD) -> None:
        """`held`: what the error says about the folder if another process holds the lock."""
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
        """Try once to take the lock; return false if the last holder has just removed the file that was locked.

        Raises:
            UserError: another process has the lock.
        """
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
        """Release the lock, and remove its file unless a worker still holds it. Do nothing if it was not taken."""
        if self._file is not None:
            if _lock(self._file, fcntl.LOCK_EX):
                self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold the lock of an output folder, since two processes would overwrite each other's files there.

    Raises:
        UserError: another process has it.
    """
    lock = SweepLock(folder, "is being written by another process; wait for it, or choose another output_dir")
    lock.take()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def sharing_lock(folder: Path) -> Iterator[None]:
    """Hold a share of the lock of the sweep in `folder`, while a worker runs one of its jobs."""
    file = None
    with suppress(OSError):  # a dry run has no lock
        file = os.fdopen(without_waiting(folder / LOCK_FILE))
        _lock(file, fcntl.LOCK_SH)
    try:
        yield
    finally:
        if file is not None:
            file.close()


def _lock(file: TextIO, kind: int) -> bool:
    """Try to take a lock of this kind; return whether it is now held."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks counts as free
    return True
