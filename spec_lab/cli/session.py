"""One call of the command line: hands the arguments to Hydra and collects how its jobs ended."""

from __future__ import annotations

import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from spec_lab.assembly import registry
from spec_lab.assembly.loggers import join_sweep
from spec_lab.cli.compose import VERSION_BASE, chosen_options, register_schemas, search_path, to_run_config
from spec_lab.cli.ending import print_refusal
from spec_lab.cli.flags import FLAGS_THAT_SHOW
from spec_lab.cli.folder import display, find_ended, folder_name
from spec_lab.cli.job import Job, JobOutcome, run_job, worst_exit_code
from spec_lab.cli.labels import name_groups
from spec_lab.cli.options import conf_folder, read_groups, run_menu
from spec_lab.cli.overrides import check_arguments, extensions_in
from spec_lab.cli.sweep import Multirun
from spec_lab.config import RunConfig
from spec_lab.errors import UserError


class Session:
    """Runs what the arguments say, in this process and one job after the other, as Hydra's basic launcher does."""

    def __init__(self, adapt: Callable[[RunConfig], RunConfig] = lambda config: config) -> None:
        """`adapt` changes each composed run before it is checked."""
        self._adapt = adapt
        self.outcomes: list[JobOutcome] = []
        self._sweep = Multirun(writes=True)
        self._has_run = False

    def run(self, arguments: Sequence[str]) -> None:
        """Check, compose and run `arguments` as they were typed.

        Raises:
            Exception: as `call_hydra`.
        """
        extensions = extensions_in(arguments)
        checked = check_arguments(arguments, run_menu(extensions))
        registered = registry.load(extensions)
        register_schemas(registered)
        shows_only = "dry_run=true" in checked or any(flag in FLAGS_THAT_SHOW for flag in checked)
        with Multirun(writes=not shows_only) as self._sweep:
            OmegaConf.register_new_resolver("sweep_folder", self._sweep.name, replace=True, use_cache=True)
            call_hydra(self._run_one, [*checked, *search_path(registered)], conf_folder())
            if self._sweep.folder is not None and any(outcome.folder is not None for outcome in self.outcomes):
                self._sweep.close([outcome.status for outcome in self.outcomes])

    def exit_code(self) -> int:
        """The exit code of the worst job."""
        return worst_exit_code(outcome.status for outcome in self.outcomes)

    def report(self) -> None:
        """Print the run's folder, or a sweep's, as the last line."""
        folders = [outcome.folder for outcome in self.outcomes if outcome.folder is not None]
        if self._sweep.folder is not None and folders:
            counts = Counter(outcome.status for outcome in self.outcomes)
            if not self._has_run:
                print(_tables(self._sweep.folder))
                print("nothing was left to run, so that this is what ran before; fresh=true runs it all again")
            print(f"{len(self.outcomes)} jobs: {', '.join(f'{count} {status}' for status, count in counts.items())}")
            print(display(self._sweep.folder.absolute()))
        elif folders:
            print(display(folders[0]))

    def _run_one(self, composed: DictConfig) -> None:
        """Hydra's task: one composed job. Errors become outcomes, so that a sweep goes on."""
        settings = HydraConfig.get()
        in_sweep = not OmegaConf.is_missing(settings.job, "num")
        try:
            config = self._adapt(to_run_config(composed))
        except UserError as error:
            print_refusal(error)
            self.outcomes.append(JobOutcome("refused"))
            return
        base = Path(settings.runtime.output_dir)
        if not in_sweep:
            base = base / config.output_dir
        else:
            join_sweep(config.logger, base.name)
        groups = read_groups(tuple(config.extensions))
        choices = name_groups(config, chosen_options(settings.runtime.choices), groups)
        earlier = self._sweep.continues and not config.dry_run
        outcome = self._ended_earlier(base, config, choices) if earlier else None
        if outcome is None:
            self._has_run = True
            outcome = run_job(Job(config, choices, base, in_sweep))
        self.outcomes.append(outcome)

    def _ended_earlier(self, base: Path, config: RunConfig, choices: dict[str, str]) -> JobOutcome | None:
        """Tells how a job of a sweep that is continued ended before the sweep was killed."""
        ended = find_ended(base, folder_name(config, choices))
        if ended is None:
            return None
        folder, status = ended
        print(f"{status} before: {display(folder.absolute())}")
        return JobOutcome(status, folder)


def _tables(folder: Path) -> str:
    """A line a run of a sweep, and where there is more."""
    from spec_lab.record.runs import search_runs
    from spec_lab.report.run_table import format_runs

    runs = search_runs([folder]).runs
    return f"{format_runs(runs)}\n\nmore: python -m spec_lab.report {display(folder.absolute())}"


def call_hydra(task: Callable[[DictConfig], None], arguments: Sequence[str], conf: Path) -> None:
    """Calls `task` with what `arguments` make of `conf`/config.yaml, once or for every job of a multirun.

    Raises:
        UserError: the arguments come to no job at all.
        Exception: they do not compose; `errors.is_of_composing` knows what Hydra raises.
    """
    jobs = itertools.count()

    def run(composed: DictConfig) -> None:
        next(jobs)
        task(composed)

    enter = hydra.main(version_base=VERSION_BASE, config_path=str(conf.absolute()), config_name="config")
    with _as_process_arguments(arguments):
        enter(run)()
    if next(jobs) == 0 and not any(flag in FLAGS_THAT_SHOW for flag in arguments):
        sweeps = [text for text in arguments if text.endswith(")")]
        raise UserError(f"{' '.join(sweeps) or 'the sweep'} comes to no job; give every key at least one value")


@contextmanager
def _as_process_arguments(arguments: Sequence[str]) -> Iterator[None]:
    """Hydra reads `sys.argv`, and raises its errors instead of printing pages of them only under HYDRA_FULL_ERROR."""
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
