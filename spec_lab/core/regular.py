"""Opens files that others may have created.

A pipe or a device instead of a regular file could make its reader wait forever, or read without end.
"""

from __future__ import annotations

import errno
import os
import stat
from io import TextIOWrapper
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading.

    Raises:
        OSError: there is no file, or it is not a regular one.
    """
    descriptor = without_waiting(path)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def regular_bytes(path: Path) -> bytes:
    """Return the content of a regular file."""
    with open_regular(path) as file:
        return file.read()


def regular_text(path: Path, encoding: str = "utf-8") -> str:
    """Return the text of a regular file, with line ends converted like `Path.read_text`."""
    with TextIOWrapper(open_regular(path), encoding=encoding) as file:
        return file.read()


def without_waiting(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file like `os.open`, but without waiting for the other end of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)
