"""Names, locks and closes the folder of a multirun."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from omegaconf import OmegaConf

from spec_lab.cli.outcomes import Outcomes
from spec_lab.core.errors import WORN_OUT, UserError
from spec_lab.core.ranks import ranks
from spec_lab.menu.refusals.run import refuse_name, refuse_output_dir
from spec_lab.program.folder import (
    close_sweep,
    discard_empty_sweep,
    make_output_dir,
    missing_folders,
    multirun_study,
    remove_empty,
    reopen_sweep,
    study_place,
)
from spec_lab.program.ground import ground_of, keep_ground
from spec_lab.program.sweep_lock import SweepLock
from spec_lab.program.sweep_progress import count_jobs
from spec_lab.record.recorder import Status


@dataclass(slots=True)
class SweepPlace:
    """The folder that the jobs of a multirun write to, for every process that runs a job.

    Attributes:
        folder: None until Hydra has asked for it, which it does only for a multirun.
        continues: whether the folder exists from an earlier process, which may have done some or all of the jobs.
        num_jobs: number of the multirun's jobs, including those left out; None if only its sweeper knows.
    """

    folder: Path | None = None
    continues: bool = False
    num_jobs: int | None = None


@dataclass(frozen=True, slots=True)
class FolderResolver:
    """The resolver `sweep_folder` of conf/config.yaml.

    Hydra also sends it to the workers of a launcher; the folder has its name by then.

    Attributes:
        name: makes and names the folder, in the process that was started from the command line.
    """

    name: Callable[..., str]
    place: SweepPlace

    def register(self) -> None:
        """Make it known to OmegaConf in this process."""
        OmegaConf.register_new_resolver("sweep_folder", self, replace=True, use_cache=True)

    def __call__(self, *parts: Any) -> str:
        return self.name(*parts)

    def __reduce__(self) -> tuple[type[KnownFolder], tuple[str]]:
        return KnownFolder, (str(self.place.folder),)


@dataclass(frozen=True, slots=True)
class KnownFolder:
    """The resolver `sweep_folder` in a worker, which gets the folder from the first process."""

    folder: str

    def __call__(self, *parts: Any) -> str:
        return self.folder


class Multirun:
    """A multirun, from the naming of its folder to its end: `with Multirun() as sweep: ...`.

    Hydra makes the folder as soon as it has its name, before any job is checked. So the folder is checked when it is
    named, and removed at the end if no job has written into it.

    Args:
        writes: whether the jobs may write; otherwise, as in a dry run, the folder is a temporary one.
        extensions: the extension modules given on the command line.

    Attributes:
        place: where the jobs write; in a dry run it is a scratch folder.
        folder: None in a dry run, and until Hydra has asked for it, which it does only for a multirun.
    """

    def __init__(self, writes: bool, extensions: tuple[str, ...] = ()) -> None:
        self.place = SweepPlace()
        self.folder: Path | None = None
        self.writes = writes
        self._extensions = extensions
        self._lock: SweepLock | None = None
        self._made: list[Path] = []
        self._scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True) if not writes else None

    def __enter__(self) -> Multirun:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._lock is not None and self.folder is not None:
            Outcomes(self.folder).clear()
            self._lock.release()
            discard_empty_sweep(self.folder)
        remove_empty(self._made)
        if self._scratch is not None:
            self._scratch.cleanup()
        if isinstance(error, OSError) and error.errno in WORN_OUT and error.filename is None and self.folder:
            error.filename = str(self.folder)

    def name(
        self,
        output_dir: str,
        name: str,
        overrides: Sequence[str],
        sweeper: Mapping[str, Any],
        fresh: bool,
        reads: Mapping[str, Any],
    ) -> str:
        """Return the folder. Make it and take its lock, unless it is temporary. The resolver in `hydra.sweep.dir` calls
        this.

        Args:
            reads: the parts of the composed run that may name weights and prompts.

        Raises:
            UserError: the folder cannot be made, may not have that name, or belongs to another process; or `torchrun`
                started several processes, as it does to split a target.
        """
        refused = refuse_name(name) or refuse_output_dir(output_dir)
        if refused is not None:
            raise UserError(refused)
        if ranks().size > 1:
            raise UserError(
                f"a multirun runs in one process, but {ranks().size} were started; leave out -m or the experiment, and "
                "start each of its runs with its own torchrun"
            )
        base = Path(output_dir if self._scratch is None else self._scratch.name)
        self._made = missing_folders(base)
        make_output_dir(base)
        study = multirun_study(name, overrides, sweeper)
        ground = ground_of([study.content, reads], self._extensions)
        folder = study_place(base, study, ground, fresh)
        self.place.folder = folder.absolute()
        self.place.num_jobs = count_jobs(overrides, sweeper)
        if self._scratch is not None:
            return str(folder)
        self.place.continues = folder.exists()
        folder.mkdir(exist_ok=True)
        self.folder, lock = folder, SweepLock(folder)
        lock.take()
        self._lock = lock
        reopen_sweep(folder)
        keep_ground(folder, ground)
        Outcomes(folder).clear()  # a killed process may have left some
        return str(folder)

    def close(self, statuses: Iterable[Status]) -> None:
        """Record that all jobs have ended."""
        assert self.folder is not None
        close_sweep(self.folder, statuses)
