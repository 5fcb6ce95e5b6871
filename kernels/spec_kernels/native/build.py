"""Compiles the C code of this folder for this machine's processor, and keeps the library in a cache if it can. It does
not import torch."""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from spec_kernels.native.compiler import BuildError, compile_in, compilers, key
from spec_kernels.native.signatures import load


@cache
def library() -> ctypes.CDLL:
    """Return the compiled functions. If they are not in the cache, compile them, which takes a second or two.

    It uses the first compiler that works.

    Raises:
        BuildError: they cannot be compiled or loaded here.
    """
    reasons = []
    for found in compilers():
        try:
            return _built_with(found)
        except (BuildError, OSError) as error:  # OSError: the compiler does not start, or the disk is full
            reasons.append(f"{found}: {error}")
    raise BuildError(next(iter(reasons), "there is no C compiler ($CC, cc, gcc, clang)"))


@cache
def problem() -> str | None:
    """Return why the library is unavailable; None if it is available, after compiling it if necessary."""
    try:
        library()
    except BuildError as error:
        return str(error)
    return None


def register_file() -> str:
    """Return the vector registers for which the library was compiled: avx512, avx2, neon, or other."""
    return str(library().native_register_file().decode())


def _built_with(found: str) -> ctypes.CDLL:
    """Return this compiler's library, from the cache if it is there and whole."""
    folder = _folder()
    kept = folder / f"native-{key(found)}.so"
    with suppress(OSError):
        return load(kept)
    with tempfile.TemporaryDirectory(dir=folder) as working:
        compile_in(Path(working), found).replace(kept)  # so another process finds a whole library or none
    return load(kept)


def _folder() -> Path:
    """Return the user's cache folder, or if it cannot be written, one that is deleted when this process exits."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "spec_lab"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if os.access(folder, os.W_OK | os.X_OK) and not os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
        return folder
    temporary = tempfile.mkdtemp(prefix="spec_lab-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return Path(temporary)
