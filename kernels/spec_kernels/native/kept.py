"""Libraries in a folder, each beside a record of its bytes, against which they are checked before they are loaded."""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path

from spec_kernels.native.signatures import load

_MOST_KEPT = 8
"""There is a library for each compiler, processor and edit of the C: those stay that were used last."""
_OWN = 0o600


def load_kept(folder: Path, key: str) -> ctypes.CDLL:
    """Load the library that `keep` put there.

    Raises:
        OSError: it is missing, not what was put there, not safe from others, or not to be loaded.
    """
    record = _record(folder, key)
    digest, _, length = _read_own(record).decode(errors="replace").strip().partition(" ")
    library = _library(folder, key, digest)
    whole = _read_own(library)
    if (str(len(whole)), hashlib.sha256(whole).hexdigest()) != (length, digest):
        raise OSError(f"{library} is not what was compiled")
    with suppress(OSError):
        os.utime(record)  # it is in use: see `_clear_up`
    return load(library)


def keep(folder: Path, key: str, built: Path) -> None:
    """Move a library into the folder, then its record, which names it by its bytes.

    So whoever looks meanwhile, or builds the same, finds all of a library or none.
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
    """Name it by its bytes as well: the system takes a library of a name that it has loaded for the same one."""
    return folder / f"native-{key}-{digest[:16]}.so"


def _read_own(path: Path) -> bytes:
    """Return what is in a file that none but this user can have written.

    Raises:
        OSError: it is not there, no file, a link, or open to others.
    """
    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe is not waited for
    try:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode) or (found.st_uid, stat.S_IMODE(found.st_mode)) != (os.geteuid(), _OWN):
            raise PermissionError(f"{path} is not a file of this user's alone")
        with open(opened, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(opened)


def _clear_up(folder: Path) -> None:
    """Leave what belongs to the keys that were used last.

    What a process has loaded stays with it, and what it is about to load it compiles again.
    """
    with suppress(OSError):
        files = sorted(folder.glob("native-*"), key=lambda file: file.lstat().st_mtime, reverse=True)
        keys = [file.name.split(".")[0].split("-")[1] for file in files]
        newest = list(dict.fromkeys(keys))[:_MOST_KEPT]
        for file, key in zip(files, keys, strict=True):
            if key not in newest:
                file.unlink(missing_ok=True)
