"""The C compilers of this machine, and what they are asked."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = ("vectors.h", "threads.h", "products.h", "tiles.h", "attention.h", "rounds.h", "native.c")
FLAGS = (
    *("-O3", "-std=gnu11", "-fno-math-errno", "-ffp-contract=fast", "-shared", "-fPIC", "-pthread"),
    "-fno-schedule-insns",  # GCC for Arm would read ahead into more registers than there are
)
_PROCESSORS = ("-march=native", "-mcpu=native")
"""The compiler flags for this machine's processor; the second is for Arm."""
MORE_FLAGS = "SPEC_LAB_CFLAGS"
"""The environment variable with flags after these, as in -mno-avx512f, which makes what a processor without gets."""


class BuildError(Exception):
    """The code cannot be compiled, or its library cannot be loaded."""


def compilers() -> list[str]:
    """Return the C compilers of this machine: $CC, then the usual names."""
    names = [name for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name]
    return [str(Path.cwd() / path) for path in map(shutil.which, names) if path]


def key(found: str) -> str:
    """Return a key of what determines the library: source, flags, compiler and processor."""
    version = _run([found, "--version"]).stdout
    known = hashlib.sha256()
    flags = *FLAGS, *_more_flags()
    for part in (*(HERE.joinpath(name).read_text() for name in SOURCES), *flags, found, version, _processor()):
        known.update(part.encode() + b"\0")
    return known.hexdigest()[:16]


def _more_flags() -> list[str]:
    return shlex.split(os.environ.get(MORE_FLAGS, ""))


def compile_in(folder: Path, found: str) -> Path:
    """Compile the library in a folder and return its path.

    Raises:
        BuildError: the compiler fails.
        OSError: it does not start.
    """
    said = ""
    for processor in _PROCESSORS:
        flags = *FLAGS, processor, *_more_flags()
        done = _run([found, *flags, str(HERE / "native.c"), "-o", str(folder / "native.so"), "-lm"])
        if done.returncode == 0:
            return folder / "native.so"
        lines = done.stderr.strip().splitlines()
        said = said or next((line for line in lines if "error" in line), f"exit code {done.returncode}")
    raise BuildError(f"it does not compile native.c (GCC 12 or Clang does): {said}")


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a compiler with English messages, since its output is parsed and is part of the key."""
    environment = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)


def _processor() -> str:
    """Describe the processor's features, since machines with different processors may share a home folder."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else [platform.processor()]
    features = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return "\n".join([platform.machine(), *sorted(set(features or lines))])
