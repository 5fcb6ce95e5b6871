"""A session is one call of the command line: it passes the arguments to Hydra and collects how its jobs ended."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from spec_lab.cli.follower import Adapt
from spec_lab.cli.job import JobOutcome, worst_exit_code
from spec_lab.cli.outcomes import Outcomes
from spec_lab.cli.sweep import FolderResolver, Multirun
from spec_lab.cli.swept_knobs import with_forced_knobs
from spec_lab.cli.task import JobTask
from spec_lab.core.errors import UserError, one_line
from spec_lab.menu import registry
from spec_lab.program.compose import VERSION_BASE, register_schemas, with_search_path
from spec_lab.program.flags import FLAGS_THAT_SHOW
from spec_lab.program.folder import display
from spec_lab.program.launchers import (
    launches_elsewhere,
    lost_worker,
    refuse_missing_launcher,
    refuse_sharing,
)
from spec_lab.program.options import conf_folder, run_menu
from spec_lab.program.overrides import check_arguments, extensions_in
from spec_lab.program.own_options import check_own_options, refuse_misplaced, typed_folders


class Session:
    """Runs the jobs that the arguments ask for: in this process one after the other, or in the workers of a
    launcher."""

    def __init__(self, adapt: Adapt = lambda config: config) -> None:
        """`adapt` changes each run that this process composes, before it is checked."""
        self._adapt = adapt
        self.outcomes: list[JobOutcome] = []
        self._sweep = Multirun(writes=True)
        self._runs_elsewhere = False

    def run(self, arguments: Sequence[str]) -> None:
        """Check, compose and run `arguments` as they were typed.

        Raises:
            UserError: an argument is refused, or the arguments make no job.
            Exception: as `call_hydra`.
        """
        extensions = extensions_in(arguments)
        menu = run_menu(extensions)
        refuse_misplaced(arguments, menu)
        checked, knobs = with_forced_knobs(check_arguments(arguments, menu), menu)
        refuse_missing_launcher(checked)
        registered = registry.load(extensions)
        added = [extension.conf for extension in registered.extensions if extension.conf is not None]
        check_own_options([*typed_folders(checked), *added], conf_folder(), menu.groups)
        register_schemas(registered)
        shows_only = "dry_run=true" in checked or any(flag in FLAGS_THAT_SHOW for flag in checked)
        with Multirun(writes=not shows_only, extensions=extensions) as self._sweep:
            FolderResolver(self._name_sweep, self._sweep.place).register()
            task = JobTask(self._sweep.place, self._adapt, extensions=extensions, knobs=knobs)
            all_arguments = with_search_path(checked, registered)
            lost = self._launch(task, all_arguments)
            self._read_outcomes(task, lost)
            if any(text.startswith("leave_out=") for text in checked):
                say_unmatched(task)
            if task.left_out and not self.outcomes:
                raise UserError("leave_out leaves out every job of the sweep; name fewer")
            if lost is None:
                check_came_to_jobs(len(self.outcomes), all_arguments)
                self._close()

    def exit_code(self) -> int:
        """Return the exit code of the worst job."""
        return worst_exit_code(outcome.status for outcome in self.outcomes)

    def report(self) -> None:
        """If there is a folder, print the table of a sweep, and as the last line the folder of the sweep or the run."""
        folders = [outcome.folder for outcome in self.outcomes if outcome.folder is not None]
        if self._sweep.folder is not None and folders:
            counts = Counter(outcome.status for outcome in self.outcomes)
            print(_tables(self._sweep.folder))
            if all(outcome.earlier for outcome in self.outcomes):
                print("all runs had already ended and are shown here; fresh=true runs everything again")
            print(f"{len(self.outcomes)} jobs: {', '.join(f'{count} {status}' for status, count in counts.items())}")
            print(display(self._sweep.folder.absolute()))
        elif folders:
            print(display(folders[0]))

    def _name_sweep(self, *parts: Any) -> str:
        """Name the folder of a multirun before any job is launched; later calls return the same name."""
        if self._sweep.place.folder is not None:
            return str(self._sweep.place.folder)
        output_dir, name, overrides, sweeper, fresh, launcher, device, shared_device, *read = parts
        if self._sweep.writes and not shared_device:
            refuse_sharing(launcher, device)
        self._runs_elsewhere = launches_elsewhere(launcher)
        target, drafter, workload = map(OmegaConf.to_container, read)
        reads = {"target": target, "drafter": drafter, "workload": workload}
        return self._sweep.name(output_dir, name, overrides, sweeper, fresh, reads)

    def _launch(self, task: JobTask, arguments: Sequence[str]) -> str | None:
        """Run all jobs. Return the launcher's message if a worker died before its job ended."""
        try:
            call_hydra(task, arguments, conf_folder())
        except Exception as error:
            lost = lost_worker(error)
            if lost is None:
                raise
            print(f"failed: a worker ended before its job ({lost}); the same command continues", file=sys.stderr)
            return lost
        return None

    def _read_outcomes(self, task: JobTask, lost: str | None) -> None:
        """Collect the outcomes of jobs in this process and, from the folder, of those in workers. If a launcher was
        used, print why jobs failed or were refused, since the output of workers may not be visible."""
        elsewhere = [] if self._sweep.place.folder is None else Outcomes(self._sweep.place.folder).read()
        self.outcomes = [*task.outcomes, *elsewhere]
        if lost is not None and all(outcome.status != "failed" for outcome in elsewhere):
            self.outcomes.append(JobOutcome("failed", reason=lost))
        if self._runs_elsewhere:
            for outcome in elsewhere:
                if outcome.reason is not None:
                    place = "" if outcome.folder is None else f" ({display(outcome.folder)})"
                    print(f"{outcome.status}: {one_line(outcome.reason)}{place}", file=sys.stderr)

    def _close(self) -> None:
        if self._sweep.folder is not None and any(outcome.folder is not None for outcome in self.outcomes):
            self._sweep.close([outcome.status for outcome in self.outcomes])


def say_unmatched(task: JobTask) -> None:
    """Print which entries of a typed `leave_out` matched no job, for jobs that ran in this process."""
    for cell in task.cells:
        if cell not in task.left_out:
            print(
                f"leave_out: no job of the sweep is '{cell}', so nothing is left "
                "out for it; name a value that it sweeps",
                file=sys.stderr,
            )


def _tables(folder: Path) -> str:
    """Return a line for each run of a sweep, and where to find more."""
    from spec_lab.record.reading import find_runs
    from spec_lab.study.run_table import runs_table

    return f"{runs_table(find_runs(folder)).text()}\n\nmore: python -m spec_lab.report {display(folder.absolute())}"


def call_hydra(task: Callable[[DictConfig], None], arguments: Sequence[str], conf: Path) -> None:
    """Call `task` with the configuration composed from `conf`/config.yaml and `arguments`: once, or for each job of a
    multirun.

    Raises:
        Exception: the arguments do not compose; `errors.is_of_composing` recognises what Hydra raises.
    """

    def run(composed: DictConfig) -> None:  # Hydra reads a task's __code__, which only functions have
        task(composed)

    enter = hydra.main(version_base=VERSION_BASE, config_path=str(conf.absolute()), config_name="config")
    with _as_process_arguments(arguments):
        enter(run)()


def check_came_to_jobs(num_jobs: int, arguments: Sequence[str]) -> None:
    """Raise UserError if `arguments` made no job at all, unless they only ask Hydra to show something."""
    if num_jobs == 0 and not any(flag in FLAGS_THAT_SHOW for flag in arguments):
        sweeps = [text for text in arguments if text.endswith(")")]
        raise UserError(f"{' '.join(sweeps) or 'the sweep'} selects no job; give every key at least one value")


@contextmanager
def _as_process_arguments(arguments: Sequence[str]) -> Iterator[None]:
    """Put the arguments where Hydra reads them, in `sys.argv`.

    Also set HYDRA_FULL_ERROR, without which Hydra prints its errors and ends the process instead of raising them.
    """
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [argv[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error
