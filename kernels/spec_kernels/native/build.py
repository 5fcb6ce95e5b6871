"""Compiles the C of this folder for the processor at hand, once: what was built is kept. Imports no torch."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

SOURCES = ("vectors.h", "products.h", "tiles.h", "attention.h", "rounds.h", "native.c")
_FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-ffp-contract=fast", "-shared", "-fPIC")
_PROCESSORS = ("-march=native", "-mcpu=native")
"""Names that compilers have for the processor at hand, the second on Arm."""
_MOST_KEPT = 8
"""The cache has a library for each compiler, processor and edit of the C: those stay that were used last."""


class BuildError(Exception):
    """There is no compiler, or it does not compile this."""


def compilers() -> list[str]:
    """Return the C compilers of this machine: $CC, then those of the usual names."""
    names = [name for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name]
    return [path for path in map(shutil.which, names) if path]


@cache
def build() -> Path:
    """Return the shared library, which is compiled where it is not in the cache: a second or two.

    Of several compilers the first that can compiles it. The library is loaded here, since there are folders that the
    system loads no code from.

    Raises:
        BuildError: it cannot be compiled here, or not be loaded.
    """
    reasons = []
    for found in compilers():
        try:
            return _built_with(found)
        except BuildError as error:
            reasons.append(str(error))
        except OSError as error:  # no room, a compiler that does not start, a library that does not load
            reasons.append(f"{found} cannot be used: {error}")
    raise BuildError(next(iter(reasons), "there is no C compiler ($CC, cc, gcc, clang)"))


@cache
def problem() -> str | None:
    """Say why there is no library; None where it is there, or can be compiled, which it then is."""
    try:
        build()
    except BuildError as error:
        return str(error)
    return None


def can_build() -> bool:
    """Tell whether the library is there, or can be compiled."""
    return problem() is None


def _built_with(found: str) -> Path:
    """Return a library of this compiler's: kept, or, where nothing is kept or loaded, of this process."""
    folder = Path(__file__).parent
    name = f"native-{_key(found, folder)}.so"
    try:
        return _loaded(found, folder / "native.c", _cache_folder() / name)
    except (OSError, RuntimeError):  # the second where there is no home
        return _loaded(found, folder / "native.c", _own_folder() / name)


def _loaded(found: str, source: Path, kept: Path) -> Path:
    """Return `kept` once it has been loaded, compiled where it is missing or is no whole library."""
    with suppress(OSError):
        os.utime(kept)  # it is in use: see `_clear_up`
    try:
        ctypes.CDLL(str(kept))
    except OSError:
        _compile(found, source, kept)
        ctypes.CDLL(str(kept))
    return kept


def _compile(found: str, source: Path, kept: Path) -> None:
    """Compile into a file of another name, so that whoever looks meanwhile sees all of the library or none."""
    said = ""
    for processor in _PROCESSORS:
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            built = Path(folder) / kept.name
            command = [found, *_FLAGS, processor, str(source), "-o", str(built), "-lm"]
            done = _run(command)
            if done.returncode == 0:
                with built.open("rb") as whole:
                    os.fsync(whole)  # a machine that stops now leaves no half of a library
                built.replace(kept)
                _clear_up(kept.parent)
                return
            lines = done.stderr.strip().splitlines()
            said = said or next((line for line in lines if "error" in line), f"exit code {done.returncode}")
    raise BuildError(f"{found} does not compile {source.name} (GCC 12 or Clang does): {said}")


def _clear_up(folder: Path) -> None:
    """Leave the libraries that were used last.

    What a process has loaded stays with it, and what it is about to load it compiles again.
    """
    with suppress(OSError):
        libraries = sorted(folder.glob("native-*.so"), key=lambda library: library.stat().st_mtime)
        for library in libraries[:-_MOST_KEPT]:
            library.unlink(missing_ok=True)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a compiler that speaks English, since what it says is read and is part of a name."""
    english = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(command, capture_output=True, text=True, errors="replace", env=english, check=False)


def _key(found: str, folder: Path) -> str:
    """Name all that the library follows from: source, flags, compiler and processor."""
    version = _run([found, "--version"]).stdout
    known = hashlib.sha256()
    for part in (*(folder.joinpath(name).read_text() for name in SOURCES), *_FLAGS, found, version, _processor()):
        known.update(part.encode() + b"\0")
    return known.hexdigest()[:16]


def _processor() -> str:
    """Say what the processor can do; a home may be shared by machines that differ."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else [platform.processor()]
    features = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return "\n".join([platform.machine(), *sorted(set(features or lines))])


def _cache_folder() -> Path:
    """Return the folder that stays.

    Raises:
        OSError: it cannot be made, or the system loads no code from there.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "spec_lab"
    folder.mkdir(parents=True, exist_ok=True)
    if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
        raise OSError(f"{folder} is mounted noexec")
    return folder


def _own_folder() -> Path:
    """Return a folder that goes with this process."""
    folder = Path(tempfile.mkdtemp(prefix="spec_lab-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
