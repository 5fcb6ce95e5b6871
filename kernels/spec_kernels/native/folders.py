"""Folders for libraries that are protected from other users: the permanent cache, and temporary ones."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_OWN = 0o700
_PREFIX, _LOCK = "spec_lab-building-", "lock"
_OLD = 3600.0
"""Seconds for which a working folder is kept even if its lock is free, since its process may not have the lock yet."""


def cache_folder() -> Path:
    """Return the permanent folder, and create it if it is missing.

    Raises:
        OSError: there is no home, the folder cannot be created, or code cannot be loaded from it.
    """
    folder = _cache_home() / "spec_lab"
    for level in reversed([level for level in (folder, *folder.parents) if not level.exists()]):
        level.mkdir(_OWN, exist_ok=True)
    if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
        raise OSError(f"{folder} is mounted noexec")
    return folder


def _cache_home() -> Path:
    """Return the folder of a user's caches. As the XDG specification requires, a relative path is ignored."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():
        return named
    try:
        found = Path("~/.cache").expanduser()
    except RuntimeError as error:
        raise OSError(str(error)) from error
    if not found.is_absolute():
        raise OSError(f"{found} is a relative path, since HOME is one")
    return found


def folder_of_this_process() -> Path:
    """Return a working folder that is deleted when this process exits."""
    until_the_end = ExitStack()
    atexit.register(until_the_end.close)
    return until_the_end.enter_context(working_folder(Path(tempfile.gettempdir())))


@contextmanager
def held(folder: Path) -> Iterator[Path]:
    """Yield a path that keeps referring to this folder, even if another is put in its place meanwhile.

    Without /proc (macOS) it is the plain path, and another folder can then take its place. The folder's mode is set to
    0700. Files that others put there before can be recognised by their owner and mode.

    Raises:
        PermissionError: it belongs to another user, or its mode cannot be set.
        OSError: it is not a folder, or is a link.
    """
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(opened).st_uid != os.geteuid():
            raise PermissionError(f"{folder} is another user's")
        if stat.S_IMODE(os.fstat(opened).st_mode) != _OWN:
            os.fchmod(opened, _OWN)
        if stat.S_IMODE(os.fstat(opened).st_mode) != _OWN:  # the file system does not support modes
            raise PermissionError(f"{folder} is open to others")
        same = Path(f"/proc/self/fd/{opened}")
        yield same if same.is_dir() else folder
    finally:
        os.close(opened)


@contextmanager
def working_folder(parent: Path) -> Iterator[Path]:
    """Yield a folder that is deleted after the block. If the process is killed, a call an hour later can delete it."""
    _remove_abandoned(parent)
    made = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent, ignore_cleanup_errors=True)
    with made as name, Path(name, _LOCK).open("ab") as lock:
        with suppress(OSError):  # without locks in the file system, _remove_abandoned removes nothing
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(name)


def _remove_abandoned(parent: Path) -> None:
    """Remove this user's old working folders whose lock is free, since their process has ended."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            found = folder.lstat()
            is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if not is_own or time.time() - found.st_mtime < _OLD:
                continue
            with (folder / _LOCK).open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
