"""Keeps standard output and error usable after their reader has gone (`| head -1`), on ASCII consoles and full
disks."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class PatientFile(io.FileIO):
    """A file that discards output once its reader has gone, or after another error, which `write` raises once.

    A run that has taken minutes must not fail because the user quit a pager.
    """

    def __init__(self, descriptor: int, name: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.name = name
        self.lost: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if not isinstance(error, BrokenPipeError):
                error.filename = self.name
                self.lost = error
                raise
            return memoryview(data).nbytes


def raise_lost(stream: TextIO) -> None:
    """Raise again the error that kept a `PatientFile` from writing, other than a closed pipe, since Hydra ignores
    errors while it flushes logs."""
    lost = getattr(getattr(getattr(stream, "buffer", None), "raw", None), "lost", None)
    if lost is not None:
        raise lost


@contextmanager
def patient_console() -> Iterator[None]:
    r"""Put a `PatientFile` under standard output and error, and write letters that their encoding lacks as `\xfc`.

    Streams that were replaced before, as by a notebook or a test, are left as they are. Output to a stream that was
    closed before the start (`2>&-`) is discarded.
    """
    output, errors = sys.stdout, sys.stderr
    if output is None:
        sys.stdout = _nowhere()
    if errors is None:
        sys.stderr = _nowhere()
    if sys.__stdout__ is not None and output is sys.__stdout__:
        sys.stdout = _patient(sys.__stdout__, "standard output", line_by_line=output.isatty())
    if sys.__stderr__ is not None and errors is sys.__stderr__:
        sys.stderr = _patient(sys.__stderr__, "standard error", line_by_line=True)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = output, errors


def _nowhere() -> TextIO:
    """Return a stream that discards its output. Unused standard descriptors are occupied too. Otherwise a file opened
    later could get one, and with it the output of C code."""
    while (descriptor := os.open(os.devnull, os.O_WRONLY)) <= 2:
        pass
    return os.fdopen(descriptor, "w")


def _patient(stream: TextIO, name: str, line_by_line: bool) -> TextIO:
    stream.flush()
    buffer = io.BufferedWriter(PatientFile(stream.fileno(), name))
    return io.TextIOWrapper(buffer, stream.encoding, errors="backslashreplace", line_buffering=line_by_line)
