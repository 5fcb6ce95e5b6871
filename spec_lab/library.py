"""The lab for other programs and notebooks: the implementation of `compose`, `run` and `examine` of `spec_lab`.

Several threads may compose. Only one run at a time is possible in a process, since concurrent runs would disturb each
other's timings. Composing restores the caller's state of Hydra, and a run restores the caller's settings of torch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.types import RunMode

from spec_lab.cli.job import Job, begin, close_record, end
from spec_lab.core.errors import UserError, is_interruption
from spec_lab.doctor.findings import Finding
from spec_lab.menu.choices import KernelsChoice
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import RunConfig
from spec_lab.menu.refusals.ranks import refuse_split
from spec_lab.menu.refusals.run import admit, refusals
from spec_lab.program.compose import compose_with_hydra, name_options, retyped, to_config_and_options
from spec_lab.program.dry_run import describe
from spec_lab.program.ending import refuse_process
from spec_lab.program.interrupts import Interrupts
from spec_lab.record.models import Request, Run
from spec_lab.record.reading import read_requests
from spec_lab.record.wording import in_html
from spec_lab.study.run_table import format_run, tables_of_run

ONE_RUN_AT_A_TIME = threading.Lock()


@dataclass(slots=True)
class Composed:
    """A composed run that has not started. `print` shows the output of `--dry-run`.

    Attributes:
        config: the typed config, which may be changed, since it is checked when it runs.
        options: the option chosen in each group. A changed entry is refused.
    """

    config: RunConfig
    options: dict[str, str]
    _as_composed: dict[str, str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._as_composed = dict(self.options)

    def __setattr__(self, name: str, value: Any) -> None:
        """Allow only the initial setting of attributes, since the run's keys are set in `config`."""
        if name not in ("config", "options", "_as_composed") or hasattr(self, name):
            raise UserError(
                f"{name} cannot be set here; set a key of the config, such as composed.config.batch_size = 4"
            )
        object.__setattr__(self, name, value)

    @property
    def choices(self) -> dict[str, str]:
        """Return the name of each group's choice in records and folder names, such as `prune: catchup`.

        Raises:
            UserError: `options` was changed.
        """
        if self.options != self._as_composed:
            raise UserError(
                "options names the composed option of each group; to change it, use spec_lab.compose([...])"
            )
        return name_options(retyped(self.config), self.options)

    def __str__(self) -> str:
        try:
            return describe(retyped(self.config), self.choices, refusals(retyped(self.config)))
        except UserError as error:
            return f"refused: {error}"

    def _repr_html_(self) -> str:
        return _preformatted(str(self))


@dataclass(frozen=True, slots=True)
class Result:
    """The results of a finished run. `print` shows its tables and its verdict; a notebook shows them as HTML.

    Attributes:
        run: as in `summary.json`; `python -m spec_lab.report` prints the definition of every number.
        folder: the folder with all of its files.
    """

    run: Run
    folder: Path

    @property
    def requests(self) -> list[Request]:
        """Return the requests, read from the folder."""
        return read_requests(self.folder)

    def __str__(self) -> str:
        return format_run(self.run)

    def _repr_html_(self) -> str:
        first, *_ = tables_of_run(self.run)
        details = f"<details><summary>stages and categories</summary>{_preformatted(str(self))}</details>"
        return f"{first.html()}<p>{in_html(self.run.verdict)}</p><p><code>{in_html(str(self.folder))}</code></p>{details}"


def compose(overrides: Sequence[str] = ()) -> Composed:
    """Implement `spec_lab.compose`."""
    composed = compose_with_hydra(overrides)
    if composed.hydra.mode is RunMode.MULTIRUN:
        experiment = composed.hydra.runtime.choices.get("experiment")
        cause = f"experiment={experiment}" if experiment else "hydra.mode=MULTIRUN"
        raise UserError(f"{cause} is several runs; compose them one after the other, or python -m spec_lab {cause}")
    return Composed(*to_config_and_options(composed))


def run(composed: Composed) -> Result:
    """Implement `spec_lab.run`."""
    config = _config_of(composed, "spec_lab.run")
    if config.dry_run:
        raise UserError("dry_run=true runs nothing; leave it out, and print the composed run")
    refuse_split(config, "spec_lab.run")
    job = Job(config, composed.choices, Path(config.output_dir), in_sweep=False)
    with ONE_RUN_AT_A_TIME, Interrupts() as interrupts:
        result = _run(job)
    if interrupts.seen:
        raise KeyboardInterrupt
    return result


def examine(composed: Composed) -> list[Finding]:
    """Implement `spec_lab.examine`."""
    config = _config_of(composed, "spec_lab.examine")
    refuse_split(config, "spec_lab.examine")
    chosen = admit(config)
    from spec_lab.doctor.examine import examine
    from spec_lab.doctor.subject import load_subject

    with ONE_RUN_AT_A_TIME, _torch_as_it_was(chosen):
        return examine(load_subject(chosen))


def _config_of(composed: object, caller: str) -> RunConfig:
    """Return the config of a composed run, with its types checked again.

    Raises:
        UserError: `composed` is not a composed run, or this process cannot run anything.
    """
    refuse_process()
    if not isinstance(composed, Composed):
        raise UserError(f"{caller} takes a composed run, not {composed!r}; use {caller}(spec_lab.compose([...]))")
    return retyped(composed.config)


def _run(job: Job) -> Result:
    """Run as `cli.job.run_job` does, but raise the error that ends the run; a UserError if that error is no bug."""
    folder = None
    try:
        chosen = admit(job.config)
        folder = begin(job)
        from spec_lab.measure.runner import record_run

        with _torch_as_it_was(chosen):
            return Result(record_run(chosen, job.choices, folder), folder)
    except (Exception, KeyboardInterrupt) as error:
        if is_interruption(error):
            if folder is not None:
                close_record(folder, "interrupted", "KeyboardInterrupt")
            raise KeyboardInterrupt from error
        _, trouble = end(job, folder, error)
        if trouble is None or isinstance(error, UserError):
            raise
        raise UserError(trouble.line) from error


@contextmanager
def _torch_as_it_was(chosen: Chosen) -> Iterator[None]:
    """Restore the caller's settings of torch after a run has changed them. Also set kernels in C back to one thread.

    The settings are the number of threads, the random states of the CPU and (if the caller has used CUDA) of the GPUs,
    and the default device and type of tensors. Inside, these two defaults are those of a fresh process, and autocast is
    off.
    """
    import torch

    num_threads, device, dtype = torch.get_num_threads(), torch.get_default_device(), torch.get_default_dtype()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    states = torch.random.fork_rng(gpus, device_type="cuda")
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
    try:
        with states, torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.set_default_dtype(dtype)
        if device.type != "cpu":
            torch.set_default_device(device)
        torch.set_num_threads(num_threads)
        if chosen.config.kernels == KernelsChoice.native:
            from spec_kernels.native import build, compiled

            if build.problem() is None:
                compiled.use_threads(1)  # only a run uses more


def _preformatted(text: str) -> str:
    return f"<pre>{in_html(text)}</pre>"
