"""Sends the record that the run's files hold to Weights & Biases, online or offline.

What is sent does not say who ran it or where. By default W&B records the host, the user's paths, the command line and
the console. All of that is switched off, and absolute paths in the config are cut to their last part. An offline run
refers to files by relative paths. `wandb sync` finds them from the directory that is named in the message at the end.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from spec_lab.core.errors import UserError
from spec_lab.record.row_schema import RequestRow, RoundRow
from spec_lab.record.scalars import scalars
from spec_lab.record.schema import Summary
from spec_lab.record.wandb_content import (
    KERNEL_COLUMNS,
    REQUEST_COLUMNS,
    copy_files,
    kernel_cells,
    request_cells,
    results_of,
    tags_of,
    wandb_config,
)
from spec_lab.record.wandb_settings import describe_wandb_error, mode_of_run

MODES = ("auto", "online", "offline", "disabled")
INIT_TIMEOUT_SECONDS = 10
REQUESTS_PER_POINT = 8

Draw = Callable[[Summary, Path], Iterable[tuple[Path, str | None]]]
"""Saves figures of a finished run in a folder. Returns a pair for each: its file, and None or why it was not drawn."""


class WandbSink:
    """One W&B run for one run of the lab.

    Args:
        mode: `auto` tries `WANDB_MODE` if that is set, else online if a key is configured. If W&B cannot start so, the
            run is logged offline, with a warning. With another mode the run is then refused.
        group: group of a sweep; None is `WANDB_RUN_GROUP`, else the sweep of W&B's own agent, else no group.
        draw: draws the run's figures; None logs none.

    Raises:
        ValueError: an unknown mode.
    """

    def __init__(
        self,
        project: str,
        entity: str | None = None,
        mode: str = "auto",
        group: str | None = None,
        draw: Draw | None = None,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"logger.mode={mode} is not known; use one of {', '.join(MODES)}")
        self._project = project
        self._entity = entity
        self._mode = mode
        self._group = group or os.environ.get("WANDB_RUN_GROUP") or os.environ.get("WANDB_SWEEP_ID")
        self._draw = draw
        self._folder = Path()
        self._run: Any = None
        self._rows: list[list[Any]] = []
        self._num_rounds = 0
        self._num_emitted = 0

    def start(self, folder: Path, summary: Summary) -> None:
        """Open the W&B run.

        Raises:
            UserError: `mode` is online and the server cannot be reached or refuses the key, or W&B cannot start.
        """
        self._folder = folder
        self._run = self._open(folder, summary)
        # W&B goes on writing to its open logs. They are deleted now, so that none is left in the folder if the run is
        # killed.
        remove_logs(Path(self._run.dir).parent)
        # Otherwise W&B would show the last value of each series as a result of the run.
        for axis in ("request", "repeat"):
            self._run.define_metric(f"{axis}/index", hidden=True, summary="none")
            self._run.define_metric(f"{axis}/*", step_metric=f"{axis}/index", summary="none")

    def round(self, row: RoundRow) -> None:
        """Do nothing: there are too many rounds to log one by one, so they are uploaded as a file."""

    def request(self, row: RequestRow) -> None:
        self._num_rounds += len(row["emitted_per_round"])
        self._num_emitted += sum(row["emitted_per_round"])
        self._rows.append(request_cells(row))
        if len(self._rows) % REQUESTS_PER_POINT == 0:
            self._log_progress()

    def finish(self, summary: Summary) -> None:
        if len(self._rows) % REQUESTS_PER_POINT:
            self._log_progress()
        for index, repeat in enumerate(summary["repeats"]):
            self._run.log({"repeat/index": index, **{f"repeat/{key}": value for key, value in repeat.items()}})
        if not self._run.disabled:
            rows = [[*row, summary["acceptance_imposed"]] for row in self._rows]
            self._log_table("requests", REQUEST_COLUMNS, rows)
            self._log_table("kernel_times", KERNEL_COLUMNS, kernel_cells(summary))
            self._log_figures(summary)
            self._log_files(summary)
        self._run.summary.update(results_of(summary))
        # W&B's sweeps find a metric only by its whole name, at the top level.
        self._run.summary.update(scalars(summary))
        directory = Path(self._run.dir).parent
        is_offline = self._run.offline
        self._run.finish(exit_code=0 if summary["status"] == "finished" else 1)
        remove_logs(directory)
        if is_offline:
            base = self._base()
            command = f"cd {base} && wandb sync {directory.resolve().relative_to(base)}"
            print(f"W&B run kept offline; to upload it: {command}", file=sys.stderr)

    def _open(self, folder: Path, summary: Summary) -> Any:
        import wandb

        elsewhere = os.environ.get("WANDB_PROJECT")
        if elsewhere not in (None, "", self._project) and not os.environ.get("WANDB_SWEEP_ID"):
            said = f"WANDB_PROJECT={elsewhere} is not read: the run goes to logger.project={self._project}"
            print(f"note: {said}", file=sys.stderr)
        try:
            return self._init(folder, summary, mode_of_run(self._mode))
        except (wandb.errors.Error, ValueError) as error:
            problem = describe_wandb_error(error)
            if self._mode != "auto":
                remedy = "logger.mode=auto or offline" if self._mode == "online" else "logger=jsonl"
                raise UserError(f"logger.mode={self._mode}: W&B cannot start ({problem}); use {remedy}") from error
        print(f"warning: W&B cannot start ({problem}); logging offline", file=sys.stderr)
        try:
            return self._init(folder, summary, "offline")
        except (wandb.errors.Error, ValueError) as error:
            raise UserError(
                f"logger=wandb: W&B cannot start ({describe_wandb_error(error)}); use logger=jsonl"
            ) from error

    def _init(self, folder: Path, summary: Summary, mode: Any) -> Any:
        import wandb

        choices = summary["choices"]
        return wandb.init(
            project=self._project,
            entity=self._entity,
            mode=mode,
            dir=str(folder),
            name=" ".join([summary["name"], *(choices[group] for group in ("drafter", "prune") if group in choices)]),
            group=self._group,
            job_type="bench",
            tags=tags_of(summary),
            config=wandb_config(summary),
            settings=private_settings(),
        )

    def _log_progress(self) -> None:
        self._run.log(
            {
                "request/index": len(self._rows),
                "request/acceptance_length_all": self._num_emitted / self._num_rounds if self._num_rounds else None,
                "request/emitted_tokens": self._num_emitted,
            }
        )

    def _log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        import wandb

        table: Any = wandb.Table(columns=list(columns), data=[list(row) for row in rows], allow_mixed_types=True)
        # An unbound table is logged as a separate artifact, and the run then contains a path below the user's home. A
        # table that is bound first is uploaded as a file of the run, and W&B shows it in the same way.
        table.bind_to_run(self._run, name, self._run.step)
        self._run.log({name: table})

    def _log_figures(self, summary: Summary) -> None:
        """Log the pictures of the run. One that cannot be drawn gives a warning, and the others are still logged."""
        import wandb

        if self._draw is None or summary["status"] != "finished":
            return
        drawn = {}
        for path, problem in self._draw(summary, self._folder / "wandb" / "figures"):
            if problem is None:
                drawn[f"figures/{path.stem}"] = wandb.Image(str(path))
            else:
                print(f"warning: W&B: {problem}", file=sys.stderr)
        if drawn:
            self._run.log(drawn)

    def _log_files(self, summary: Summary) -> None:
        """Log the record as an artifact: copies inside the run's own folder."""
        import wandb

        artifact = wandb.Artifact(f"run-{self._run.id}-record", type="record")
        for copy in copy_files(self._folder, self._folder / "wandb" / "record", summary):
            entry = artifact.add_file(str(copy), policy="immutable")
            entry.local_path = os.path.relpath(copy, self._base())
        self._run.log_artifact(artifact)

    def _base(self) -> Path:
        """Return the directory that paths inside the W&B run are relative to: where an uploading process runs.

        An online run is uploaded from the working directory. An offline run is uploaded later by the printed
        command: from the working directory if the run's folder is below it, else from the run's folder.
        """
        here = Path.cwd()
        return here if not self._run.offline or self._folder.resolve().is_relative_to(here) else self._folder.resolve()


def private_settings() -> Any:
    """Return settings with which W&B records nothing about the machine and its user."""
    import wandb

    return wandb.Settings(
        console="off",
        disable_git=True,
        host="not recorded",
        init_timeout=INIT_TIMEOUT_SECONDS,
        program="spec_lab",
        save_code=False,
        silent=True,
        symlink=False,
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )


def remove_logs(directory: Path) -> None:
    """Delete W&B's debug logs, which contain absolute paths. Syncing does not need them."""
    shutil.rmtree(directory / "logs", ignore_errors=True)
