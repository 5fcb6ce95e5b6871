"""Folders in which no other user can put a library: the one that stays, and those that go with a process."""

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
"""Seconds after which a working folder is nobody's: a compiler has minutes."""


def cache_folder() -> Path:
    """Return the folder that stays, made where it is missing.

    Raises:
        OSError: there is no home, it cannot be made, or the system loads no code from there.
    """
    folder = _cache_home() / "spec_lab"
    for level in reversed([level for level in (folder, *folder.parents) if not level.exists()]):
        level.mkdir(_OWN, exist_ok=True)
    if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
        raise OSError(f"{folder} is mounted noexec")
    return folder


def _cache_home() -> Path:
    """Return where a user's caches are; the XDG specification has a relative path ignored."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():
        return named
    try:
        found = Path("~/.cache").expanduser()
    except RuntimeError as error:
        raise OSError(str(error)) from error
    if not found.is_absolute():
        raise OSError(f"{found} lies in no home")
    return found


def folder_of_this_process() -> Path:
    """Return a folder that goes with this process."""
    until_the_end = ExitStack()
    atexit.register(until_the_end.close)
    return until_the_end.enter_context(working_folder(Path(tempfile.gettempdir())))


@contextmanager
def held(folder: Path) -> Iterator[Path]:
    """Give a path that stays with this very folder, whatever is put in its place meanwhile.

    Its mode becomes 0700: what others have put there before shows in the owner and mode of each file.

    Raises:
        PermissionError: it is another user's, or its mode cannot be had.
        OSError: it is no folder, or a link.
    """
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(opened).st_uid != os.geteuid():
            raise PermissionError(f"{folder} is another user's")
        if stat.S_IMODE(os.fstat(opened).st_mode) != _OWN:
            os.fchmod(opened, _OWN)
        if stat.S_IMODE(os.fstat(opened).st_mode) != _OWN:  # of a file system that knows none
            raise PermissionError(f"{folder} is open to others")
        same = Path(f"/proc/self/fd/{opened}")
        yield same if same.is_dir() else folder
    finally:
        os.close(opened)


@contextmanager
def working_folder(parent: Path) -> Iterator[Path]:
    """Give a folder that goes with the block; that of a process which was killed goes with a later one's."""
    _remove_abandoned(parent)
    made = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent, ignore_cleanup_errors=True)
    with made as name, Path(name, _LOCK).open("ab") as lock:
        with suppress(OSError):  # where the file system has no locks nothing is removed
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(name)


def _remove_abandoned(parent: Path) -> None:
    """Remove working folders of this user's that are old and whose process has ended, with which its lock went."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            found = folder.lstat()
            is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if not is_own or time.time() - found.st_mtime < _OLD:
                continue
            with (folder / _LOCK).open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
