"""The C compilers of this machine, and how they are run: not for ever, and on a disk that is named once it is full."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = ("vectors.h", "threads.h", "products.h", "tiles.h", "attention.h", "rounds.h", "native.c")
FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-ffp-contract=fast", "-shared", "-fPIC", "-pthread")
_PROCESSORS = ("-march=native", "-mcpu=native")
"""Names that compilers have for the processor at hand, the second on Arm."""
TIME_LIMIT = 120.0
"""Seconds that a compiler has for what takes it one or two."""
_ROOM = 4 << 20
"""Bytes that a compiler needs at most, for files of its own too."""


class BuildError(Exception):
    """There is no compiler, or it does not compile this, or has no room."""


def compilers() -> list[str]:
    """Return the C compilers of this machine: $CC, then those of the usual names."""
    names = [name for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name]
    return [str(Path.cwd() / path) for path in map(shutil.which, names) if path]


def key(found: str) -> str:
    """Name all that the library follows from: source, flags, compiler and processor."""
    version = _run([found, "--version"], HERE).stdout
    known = hashlib.sha256()
    for part in (*(HERE.joinpath(name).read_text() for name in SOURCES), *FLAGS, found, version, _processor()):
        known.update(part.encode() + b"\0")
    return known.hexdigest()[:16]


def compile_in(folder: Path, found: str) -> Path:
    """Compile the library in a folder, which all files of the compiler's go to, and return where it is.

    Raises:
        BuildError: the compiler does not compile it, or takes too long.
        OSError: the disk is full, or the compiler does not start.
    """
    said = ""
    for processor in _PROCESSORS:
        command = [found, *FLAGS, processor, str(HERE / "native.c"), "-o", "native.so", "-lm"]
        done = _run(command, folder)
        if done.returncode == 0:
            return folder / "native.so"
        _assert_room(folder)
        lines = done.stderr.strip().splitlines()
        said = said or next((line for line in lines if "error" in line), f"exit code {done.returncode}")
    raise BuildError(f"{found} does not compile native.c (GCC 12 or Clang does): {said}")


def _assert_room(folder: Path) -> None:
    """Raise what the system says where there is no room: compilers say it in many ways."""
    filled = folder / "room"
    try:
        filled.write_bytes(os.urandom(_ROOM))
    finally:
        filled.unlink(missing_ok=True)


def _run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a compiler that speaks English, since what it says is read and is part of a name.

    Raises:
        BuildError: it takes too long.
    """
    environment = {**os.environ, "LC_ALL": "C", "TMPDIR": "."}
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as started:
        try:
            said, complained = started.communicate(timeout=TIME_LIMIT)
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{command[0]} has not ended within {TIME_LIMIT:g} s") from error
        finally:
            if started.returncode is None:  # with all that it has started: these have its pipes
                os.killpg(started.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, started.returncode, said, complained)


def _processor() -> str:
    """Say what the processor can do; a home may be shared by machines that differ."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else [platform.processor()]
    features = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return "\n".join([platform.machine(), *sorted(set(features or lines))])
