"""The folder of a multirun: who names it, holds it and closes it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from spec_lab.cli.folder import (
    close_sweep,
    discard_empty_sweep,
    make_output_dir,
    missing_folders,
    multirun_place,
    remove_empty,
)
from spec_lab.cli.sweep_lock import SweepLock
from spec_lab.compatibility.names import refuse_name
from spec_lab.errors import WORN_OUT, UserError
from spec_lab.ranks import ranks
from spec_lab.record.schema import Status


class Multirun:
    """A multirun from the naming of its folder to its end: `with Multirun() as sweep: ...`.

    Hydra makes the folder as soon as it has its name, before any job is checked. So all that speaks against the folder
    is said when it is named, and what no job has written into is removed at the end.

    Args:
        writes: whether the jobs may write; a dry run gets a folder that is gone when it ends.

    Attributes:
        folder: None until Hydra has asked for it, as it does for a multirun only, and in a dry run.
        continues: whether an earlier process left the folder behind, with some of the jobs done, or all.
    """

    def __init__(self, writes: bool) -> None:
        self.folder: Path | None = None
        self.continues = False
        self._writes = writes
        self._lock: SweepLock | None = None
        self._made: list[Path] = []
        self._scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True) if not writes else None

    def __enter__(self) -> Multirun:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._lock is not None and self.folder is not None:
            self._lock.release()
            discard_empty_sweep(self.folder)
        remove_empty(self._made)
        if self._scratch is not None:
            self._scratch.cleanup()
        if isinstance(error, OSError) and error.errno in WORN_OUT and error.filename is None and self.folder:
            error.filename = str(self.folder)

    def name(
        self, output_dir: str, name: str, overrides: Sequence[str], sweeper: Mapping[str, Any], fresh: bool
    ) -> str:
        """The resolver behind `hydra.sweep.dir`; makes the folder and takes its lock.

        Raises:
            UserError: the folder cannot be made, may not have that name, or belongs to another process; or several
                processes were started, which split a target.
        """
        refused = refuse_name(name)
        if refused is not None:
            raise UserError(refused)
        if ranks().size > 1:
            raise UserError(
                f"a multirun is for one process, and {ranks().size} were started; leave out -m or the experiment, and "
                "start each of its runs with a torchrun of its own"
            )
        base = Path(output_dir if self._scratch is None else self._scratch.name)
        self._made = missing_folders(base)
        make_output_dir(base)
        folder = multirun_place(base, name, overrides, sweeper, fresh)
        if self._scratch is not None:
            return str(folder)
        self.continues = folder.exists()
        folder.mkdir(exist_ok=True)
        self.folder, lock = folder, SweepLock(folder)
        lock.take()
        self._lock = lock
        return str(folder)

    def close(self, statuses: Iterable[Status]) -> None:
        """Record that all jobs have ended."""
        assert self.folder is not None
        close_sweep(self.folder, statuses)
