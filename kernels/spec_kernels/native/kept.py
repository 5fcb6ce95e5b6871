"""Keeps libraries in a folder, each with a record of its bytes, against which it is checked before it is loaded."""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path

from spec_kernels.native.signatures import load

_MOST_KEPT = 8
"""The number of libraries that are kept: the most recently used ones. Each compiler, processor and edit of the C code
makes another."""
_OWN = 0o600


def load_kept(folder: Path, key: str) -> ctypes.CDLL:
    """Load the library that `keep` put there.

    Raises:
        OSError: it is missing, was changed, can be changed by others, or cannot be loaded.
    """
    record = _record(folder, key)
    digest, _, length = _read_own(record).decode(errors="replace").strip().partition(" ")
    library = _library(folder, key, digest)
    whole = _read_own(library)
    if (str(len(whole)), hashlib.sha256(whole).hexdigest()) != (length, digest):
        raise OSError(f"{library} is not the file that was compiled")
    with suppress(OSError):
        os.utime(record)  # marks it as recently used, see `_clear_up`
    return load(library)


def keep(folder: Path, key: str, built: Path) -> None:
    """Move a library into the folder, then its record, which identifies it by its bytes.

    So another process that looks meanwhile, or builds the same library, finds either a complete one or none.
    """
    whole = built.read_bytes()
    digest = hashlib.sha256(whole).hexdigest()
    record = built.with_name("record")
    record.write_text(f"{digest} {len(whole)}\n")
    for made, place in ((built, _library(folder, key, digest)), (record, _record(folder, key))):
        made.chmod(_OWN)
        made.replace(place)
    _clear_up(folder)


def _record(folder: Path, key: str) -> Path:
    return folder / f"native-{key}.sha256"


def _library(folder: Path, key: str, digest: str) -> Path:
    """Return its path, which includes a digest, since the system does not load a second library of the same name."""
    return folder / f"native-{key}-{digest[:16]}.so"


def _read_own(path: Path) -> bytes:
    """Return the contents of a file that only this user can have written.

    Raises:
        OSError: it is missing, is a link or no regular file, or has another owner or other permissions.
    """
    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # does not wait if it is a pipe
    try:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode) or (found.st_uid, stat.S_IMODE(found.st_mode)) != (os.geteuid(), _OWN):
            raise PermissionError(f"{path} is not private to this user")
        with open(opened, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(opened)


def _clear_up(folder: Path) -> None:
    """Delete all but the most recently used libraries.

    A process that has loaded one can still use it. A process that is about to load it compiles it again.
    """
    with suppress(OSError):
        files = sorted(folder.glob("native-*"), key=lambda file: file.lstat().st_mtime, reverse=True)
        keys = [file.name.split(".")[0].split("-")[1] for file in files]
        newest = list(dict.fromkeys(keys))[:_MOST_KEPT]
        for file, key in zip(files, keys, strict=True):
            if key not in newest:
                file.unlink(missing_ok=True)
