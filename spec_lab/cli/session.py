"""One call of the command line: hands the arguments to Hydra and collects how its jobs ended."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from spec_lab.assembly import registry
from spec_lab.cli.compose import VERSION_BASE, chosen_options, register_schemas, search_path, to_run_config
from spec_lab.cli.ending import print_refusal
from spec_lab.cli.folder import close_sweep, discard_empty_sweep, display, find_ended, folder_name, sweep_folder
from spec_lab.cli.job import Job, JobOutcome, run_job, worst_exit_code
from spec_lab.cli.options import conf_folder, run_menu
from spec_lab.cli.overrides import check_arguments, extensions_in
from spec_lab.config import RunConfig
from spec_lab.errors import UserError


class Session:
    """Runs what the arguments say, in this process and one job after the other, as Hydra's basic launcher does."""

    def __init__(self) -> None:
        self.outcomes: list[JobOutcome] = []
        self.sweep: Path | None = None
        self._continues = False

    def run(self, arguments: Sequence[str]) -> None:
        """Check, compose and run `arguments` as they were typed.

        Raises:
            HydraException, OmegaConfBaseException, ValueError: the arguments do not compose; Hydra raises all three.
        """
        extensions = extensions_in(arguments)
        checked = check_arguments(arguments, run_menu(extensions))
        registered = registry.load(extensions)
        register_schemas(registered)
        OmegaConf.register_new_resolver("sweep_folder", self._name_sweep, replace=True, use_cache=True)
        try:
            call_hydra(self._run_one, [*checked, *search_path(registered)], conf_folder())
            if self.sweep is not None and any(outcome.folder is not None for outcome in self.outcomes):
                close_sweep(self.sweep, [outcome.status for outcome in self.outcomes])
        finally:
            if self.sweep is not None:
                discard_empty_sweep(self.sweep)

    def exit_code(self) -> int:
        """That of the worst job."""
        return worst_exit_code(outcome.status for outcome in self.outcomes)

    def report(self) -> None:
        """Print the run's folder, or a sweep's, as the last line."""
        folders = [outcome.folder for outcome in self.outcomes if outcome.folder is not None]
        if self.sweep is not None and folders:
            counts = Counter(outcome.status for outcome in self.outcomes)
            print(f"{len(self.outcomes)} jobs: {', '.join(f'{count} {status}' for status, count in counts.items())}")
            print(display(self.sweep.absolute()))
        elif folders:
            print(display(folders[0]))

    def _run_one(self, composed: DictConfig) -> None:
        """Hydra's task: one composed job. Errors become outcomes, so that a sweep goes on."""
        settings = HydraConfig.get()
        in_sweep = not OmegaConf.is_missing(settings.job, "num")
        try:
            config = to_run_config(composed)
        except UserError as error:
            print_refusal(error)
            self.outcomes.append(JobOutcome("refused"))
            return
        base = Path(settings.runtime.output_dir)
        if not in_sweep:
            base = base / config.output_dir
        elif config.logger.group is None:
            config.logger.group = base.name
        choices = chosen_options(settings.runtime.choices)
        self.outcomes.append(
            (self._ended_earlier(base, config, choices) if self._continues and not config.dry_run else None)
            or run_job(Job(config, choices, base, in_sweep))
        )

    def _ended_earlier(self, base: Path, config: RunConfig, choices: dict[str, str]) -> JobOutcome | None:
        """How a job of a sweep that is continued ended before the sweep was killed."""
        ended = find_ended(base, folder_name(config, choices))
        if ended is None:
            return None
        folder, status = ended
        print(f"{status} before: {display(folder.absolute())}")
        return JobOutcome(status, folder)

    def _name_sweep(self, output_dir: str, name: str, overrides: Sequence[str], sweeper: Mapping[str, Any]) -> str:
        folder = sweep_folder(output_dir, name, overrides, sweeper)
        self.sweep = Path(folder)
        self._continues = self.sweep.exists()
        return folder


def call_hydra(task: Callable[[DictConfig], None], arguments: Sequence[str], conf: Path) -> None:
    """Calls `task` with what `arguments` make of `conf`/config.yaml, once or for every job of a multirun.

    Raises:
        HydraException, OmegaConfBaseException, ValueError: the arguments do not compose; Hydra raises all three.
    """
    enter = hydra.main(version_base=VERSION_BASE, config_path=str(conf.absolute()), config_name="config")
    with _as_process_arguments(arguments):
        enter(task)()


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
