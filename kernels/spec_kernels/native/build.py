"""Compiles the C of this folder for the processor at hand, once: what was built is kept. Imports no torch."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCES = ("vectors.h", "products.h", "attention.h", "native.c")
_FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-ffp-contract=fast", "-shared", "-fPIC")
_PROCESSORS = ("-march=native", "-mcpu=native")
"""Names that compilers have for the processor at hand, the second on Arm."""


class BuildError(Exception):
    """There is no compiler, or it does not compile this."""


def compiler() -> str | None:
    """Return the C compiler of this machine: $CC, or the first of the usual names."""
    names = [name for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name]
    return next((path for path in map(shutil.which, names) if path), None)


@cache
def build() -> Path:
    """Return the shared library, which is compiled where it is not in the cache: a second or two.

    Raises:
        BuildError: it cannot be compiled here.
    """
    found = compiler()
    if found is None:
        raise BuildError("there is no C compiler ($CC, cc, gcc, clang)")
    folder = Path(__file__).parent
    try:
        kept = _cache_folder() / f"native-{_key(found, folder)}.so"
        if not kept.exists():
            _compile(found, folder / "native.c", kept)
    except OSError as error:  # no room, or a compiler that does not start
        raise BuildError(f"{found} cannot be used: {error}") from error
    return kept


@cache
def can_build() -> bool:
    """Tell whether the library is there, or can be compiled; if it can, it is."""
    try:
        build()
    except BuildError:
        return False
    return True


def _compile(found: str, source: Path, kept: Path) -> None:
    """Compile into a file of another name, so that whoever looks meanwhile sees all of the library or none."""
    said = ""
    for processor in _PROCESSORS:
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            built = Path(folder) / kept.name
            command = [found, *_FLAGS, processor, str(source), "-o", str(built), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                built.replace(kept)
                return
            said = said or next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
    raise BuildError(f"{found} does not compile {source.name}: {said}")


def _key(found: str, folder: Path) -> str:
    """Name all that the library follows from: source, flags, compiler and processor."""
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
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
    """Return a folder that stays, or, where none can be made, one of this process."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "spec_lab"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="spec_lab-"))
    return folder
