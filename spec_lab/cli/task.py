"""The task that Hydra calls: it runs a composed job in this process, or in a worker of a launcher on any machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from spec_lab.cli.follower import Adapt
from spec_lab.cli.job import Job, JobOutcome, run_job
from spec_lab.cli.outcomes import Outcomes
from spec_lab.cli.sweep import SweepPlace
from spec_lab.cli.swept_knobs import take_out
from spec_lab.core.errors import UserError
from spec_lab.menu import registry
from spec_lab.menu.config import RunConfig
from spec_lab.options.loggers import join_sweep
from spec_lab.program.compose import chosen_options, refuse_unread_extensions, to_run_config
from spec_lab.program.ending import print_refusal
from spec_lab.program.folder import display, find_ended, folder_name, forget_places
from spec_lab.program.labels import name_groups
from spec_lab.program.lease import leased, spread
from spec_lab.program.left_out import cell_left_out
from spec_lab.program.options import read_groups
from spec_lab.program.sweep_lock import sharing_lock
from spec_lab.program.sweep_progress import SweepProgress

IN_PROCESS = "basic"
"""Hydra's default launcher, which runs one job after the other in the calling process."""


@dataclass
class JobTask:
    """Runs jobs in this process and keeps their outcomes. When it is sent to another process it becomes a `WorkerTask`.

    Attributes:
        place: where the jobs of a multirun write; its folder is known when Hydra launches the first job.
        adapt: changes each composed run before it is checked.
        extensions: the extension modules given on the command line, which the jobs are composed with.
        knobs: those that only some of the swept options have.
        cells: the entries of `leave_out`; `left_out` has those that matched a job.
    """

    place: SweepPlace
    adapt: Adapt
    outcomes: list[JobOutcome] = field(default_factory=list)
    extensions: tuple[str, ...] = ()
    knobs: tuple[str, ...] = ()
    progress: SweepProgress = field(default_factory=SweepProgress)
    cells: dict[str, None] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)
    _seen: set[str] = field(default_factory=set)

    def __call__(self, composed: DictConfig) -> None:
        if self._is_another(composed):
            return
        self.cells.update(dict.fromkeys(composed.leave_out))
        if (cell := left_out(composed)) is not None:
            self.left_out.add(cell)
            return
        job = HydraConfig.get().job
        in_sweep = not OmegaConf.is_missing(job, "num") and not composed.dry_run
        if in_sweep:
            self.progress.begin(job.num + 1, self.place.num_jobs)
        outcome = run_composed(composed, self.place, self._adapted, self.extensions)
        self.progress.end(in_sweep and not outcome.earlier and outcome.status != "refused")
        self.outcomes.append(outcome)

    def _is_another(self, composed: DictConfig) -> bool:
        """Return whether an earlier job is equal to this one once knobs that its options do not have are removed. Print
        a line if so."""
        unread = take_out(composed, self.knobs)
        if not unread:
            return False
        text = OmegaConf.to_yaml(composed)
        is_another = text in self._seen
        self._seen.add(text)
        if is_another:
            print(f"left out: an earlier job is the same, since {', '.join(unread)} belongs to another option")
        return is_another

    def _adapted(self, config: RunConfig) -> RunConfig:
        config = self.adapt(config)
        return config

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return WorkerTask, (self.place, self.extensions, self.knobs)


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """Runs jobs in a worker process, and writes their outcomes into the multirun's folder."""

    place: SweepPlace
    extensions: tuple[str, ...] = ()
    knobs: tuple[str, ...] = ()

    def __call__(self, composed: DictConfig) -> None:
        refuse_moved_folders(self.place)
        take_out(composed, self.knobs)
        assert self.place.folder is not None, "a launcher starts jobs once their folder has a name"
        if left_out(composed) is not None:
            return
        outcomes, number = Outcomes(self.place.folder), HydraConfig.get().job.num
        with sharing_lock(self.place.folder):
            outcomes.begin(number)
            ended = run_composed(composed, self.place, lambda config: config, self.extensions)
            outcomes.end(number, ended)


def refuse_moved_folders(place: SweepPlace) -> None:
    """Raise UserError if a file of options, which may set any key of Hydra's, sets one of Hydra's folders."""
    settings = HydraConfig.get()
    moved = {
        "hydra.run.dir": settings.run.dir != ".",
        "hydra.output_subdir": settings.output_subdir is not None,
        "hydra.sweep.subdir": settings.sweep.subdir != ".",
    }
    if not OmegaConf.is_missing(settings.job, "num"):
        # The folder was never named if the file sets another one in its place.
        moved["hydra.sweep.dir"] = place.folder is None or Path(settings.sweep.dir).absolute() != place.folder
    for key in [key for key, is_moved in moved.items() if is_moved]:
        raise UserError(f"{key} is set by a file of options, but the lab itself names its folders; use output_dir=DIR")


def refuse_unread_sweep() -> None:
    """Raise UserError if a file of options sets sweep parameters but this is not a multirun."""
    settings = HydraConfig.get()
    if settings.sweeper.get("params") and OmegaConf.is_missing(settings.job, "num"):
        raise UserError(
            "hydra.sweeper.params sets up a sweep, but this is one run, which does not read it; add -m, or mode: "
            "MULTIRUN below hydra: in the file"
        )


def left_out(composed: DictConfig) -> str | None:
    """Return the entry of `leave_out` that a job matches, and print a line; None for jobs that run."""
    settings = HydraConfig.get()
    cell = None if OmegaConf.is_missing(settings.job, "num") else cell_left_out(composed, settings.runtime.choices)
    if cell is not None:
        print(f"left out: {cell} (leave_out=[] runs it)")
    return cell


def run_composed(composed: DictConfig, place: SweepPlace, adapt: Adapt, extensions: tuple[str, ...]) -> JobOutcome:
    """Run one composed job, unless it ended before in a multirun that is now continued. Its errors become outcomes."""
    settings = HydraConfig.get()
    in_sweep = not OmegaConf.is_missing(settings.job, "num")
    launcher = settings.runtime.choices["hydra/launcher"]
    base = Path(settings.runtime.output_dir)
    try:
        if launcher != IN_PROCESS and not in_sweep:
            raise UserError(f"hydra/launcher={launcher}: a single run has nothing to launch; leave it out, or add -m")
        refuse_moved_folders(place)
        refuse_unread_sweep()
        config = adapt(to_run_config(composed))
        refuse_unread_extensions(config.extensions, registry.load(extensions))
        if in_sweep:
            forget_places(base)
            join_sweep(config.logger, base.name)
        else:
            base = base / config.output_dir
        choices = name_groups(config, chosen_options(settings.runtime.choices), read_groups(tuple(config.extensions)))
        ended = find_ended(base, folder_name(config, choices)) if place.continues and not config.dry_run else None
        if ended is not None:
            folder, status = ended
            print(f"{status} before: {display(folder.absolute())}")
            return JobOutcome(status, folder, earlier=True)
        with nullcontext() if launcher == IN_PROCESS or config.dry_run else device_of(config):
            return run_job(Job(config, choices, base, in_sweep))
    except UserError as error:
        print_refusal(error)
        return JobOutcome("refused", reason=str(error))


def device_of(config: RunConfig) -> AbstractContextManager[None]:
    """Choose the device of a job in a worker. The job holds it alone inside the returned context, except with
    `shared_device`."""
    if not config.shared_device:
        return leased(config.device)
    spread()
    return nullcontext()
