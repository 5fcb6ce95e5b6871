"""Compiles the C code of this folder for this machine's processor, and keeps the library in a cache if it can. It does
not import torch."""

from __future__ import annotations

import ctypes
import errno
from contextlib import suppress
from functools import cache
from pathlib import Path

from spec_kernels.native.compiler import BuildError, compile_in, compilers, key
from spec_kernels.native.folders import cache_folder, folder_of_this_process, held, working_folder
from spec_kernels.native.kept import keep, load_kept

_FULL = errno.ENOSPC, errno.EDQUOT


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
        except BuildError as error:
            reasons.append(str(error))
        except OSError as error:  # such as a compiler that does not start, or a library that does not load
            reasons.append(_said(error, found))
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


def _said(error: OSError, found: str) -> str:
    if error.errno in _FULL:
        return f"the disk of {error.filename} is full: make room there"
    return f"{found} cannot be used: {error}"


def _built_with(found: str) -> ctypes.CDLL:
    """Return this compiler's library from the cache; if nothing can be safely kept or loaded there, compile one for
    this process."""
    name = key(found)
    try:
        return _library_in(cache_folder(), found, name)
    except OSError as of_cache:
        try:
            return _library_in(folder_of_this_process(), found, name)
        except OSError as error:
            raise of_cache if of_cache.errno in _FULL else error from None


def _library_in(folder: Path, found: str, name: str) -> ctypes.CDLL:
    """Return the library kept in a folder. If it is missing or fails its check, silently compile it again."""
    with held(folder) as same:
        with suppress(OSError):
            return load_kept(same, name)
        try:
            with working_folder(same) as working:
                keep(same, name, compile_in(working, found))
            return load_kept(same, name)
        except OSError as error:
            if error.errno in _FULL:
                raise OSError(error.errno, "no room", str(folder)) from error
            raise OSError(str(error).replace(str(same), str(folder))) from error
