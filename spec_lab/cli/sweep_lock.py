"""One process a sweep: two that share a folder would each run every job."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from spec_lab.errors import UserError

LOCK_FILE = ".lock"


class SweepLock:
    """Held from `take` to `release`, or to the end of the process, however it ends: the system gives it back."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_FILE
        self._file: TextIO | None = None

    def take(self) -> None:
        """Take the lock; the folder must exist.

        Raises:
            UserError: another process has it.
        """
        while not self._is_taken():
            pass

    def _is_taken(self) -> bool:
        """Tells whether the locked file is the one that stands there: its last holder may just have removed it."""
        file = self._path.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise UserError(
                f"{self._path.parent} is a sweep that another process is running; wait for it, or set another name=..."
            ) from error
        except OSError:
            pass  # a file system without locks, where nothing can be known
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                self._file = file
                return True
        file.close()
        return False

    def release(self) -> None:
        """Give the lock back and remove its file; nothing happens where it was not taken."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None
