"""Sends the record that a run's files hold to Weights & Biases, online or offline.

What is sent does not say who ran it or where. By default W&B records the host, the user's paths, the command line and
the console; all of that is switched off, and absolute paths are cut to their last part. An offline run refers to files
by relative paths, which `wandb sync` finds from the directory that is named at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_lab.core.errors import UserError, one_line, without_folders
from spec_lab.record.names import CONFIG_FILE, REQUESTS_FILE, ROUNDS_FILE, SUMMARY_FILE

if TYPE_CHECKING:
    from spec_lab.record.models import Request, Round, Run

INIT_TIMEOUT_SECONDS = 10
LONGEST_TAG = 64
NOT_FACTORS = ("logger", "size", "debug")
UNNAMED = ("drafter.num_draft_tokens", "batch_size", "kernels", "recurrent.rollback")
"""Knobs that a study or a sweep may vary, but that are in no group's tag."""
REQUEST_COLUMNS = (
    "id", "category", "rounds", "acceptance_length_all", "output_tokens", "finish_reason", "correct", "divergence",
    "text", "acceptance_imposed",
)  # fmt: skip
KERNEL_COLUMNS = ("name", "calls_per_round", "us_per_round")
RESULTS = ("status", "reason", "verdict", "repeats", "by_category", "references")
ORIGIN = ("choices", "engine", "engine_version", "target", "machine")

Draw = Callable[["Run", Path], Iterable[Path]]
"""Saves figures of a finished run, with its requests from a folder, and returns their files."""


class WandbSink:
    """One W&B run for one run of the lab.

    Args:
        mode: `auto` is `WANDB_MODE`, else online if a key is configured; where W&B cannot start so, the run is logged
            offline, with a warning. With another mode the run is then refused.
        group: None is `WANDB_RUN_GROUP`, else the sweep of W&B's own agent, else no group.
        draw: draws the run's figures; None logs none.
    """

    def __init__(
        self,
        project: str,
        entity: str | None = None,
        mode: str = "auto",
        group: str | None = None,
        draw: Draw | None = None,
    ) -> None:
        self._project = project
        self._entity = entity
        self._mode = mode
        self._group = group or os.environ.get("WANDB_RUN_GROUP") or os.environ.get("WANDB_SWEEP_ID")
        self._draw = draw
        self._folder = Path()
        self._run: Any = None
        self._rows: list[list[Any]] = []

    def start(self, folder: Path, run: Run) -> None:
        """Open the W&B run.

        Raises:
            UserError: W&B cannot start in the mode that was asked for.
        """
        import wandb

        self._folder = folder
        try:
            self._run = self._init(run, mode_of_run(self._mode))
        except (wandb.errors.Error, ValueError) as error:
            if self._mode != "auto":
                problem = describe_wandb_error(error)
                raise UserError(f"logger.mode={self._mode}: W&B cannot start ({problem}); use logger=jsonl") from error
            print(f"warning: W&B cannot start ({describe_wandb_error(error)}); logging offline", file=sys.stderr)
            self._run = self._init(run, "offline")
        remove_logs(Path(self._run.dir).parent)  # now, so that none is left if the run is killed

    def round(self, row: Round) -> None:
        """Do nothing: there are too many rounds to log one by one, so they are uploaded as a file."""

    def request(self, row: Request) -> None:
        emitted = row.emitted_per_round or []
        length = sum(emitted) / len(emitted) if emitted else None
        kind = None if row.divergence is None else row.divergence.kind
        answered = (row.finish_reason, row.correct, kind, row.text)
        self._rows.append([row.id, row.category, len(emitted), length, len(row.output_ids), *answered])

    def finish(self, run: Run) -> None:
        if not self._run.disabled:
            rows = [[*row, run.acceptance_imposed] for row in self._rows]
            self._log_table("requests", REQUEST_COLUMNS, rows)
            kernels = [[kernel.name, kernel.calls_per_round, kernel.us_per_round] for kernel in run.kernels]
            self._log_table("kernel_times", KERNEL_COLUMNS, kernels)
            self._log_figures(run)
            self._log_files(run)
        self._run.summary.update(without_user_paths(run.model_dump(include=set(RESULTS))))
        # W&B's sweeps find a metric only by its whole name, at the top level.
        self._run.summary.update(run.scalars())
        directory, is_offline = Path(self._run.dir).parent, self._run.offline
        self._run.finish(exit_code=0 if run.status == "finished" else 1)
        remove_logs(directory)
        if is_offline:
            base = self._base()
            command = f"cd {base} && wandb sync {directory.resolve().relative_to(base)}"
            print(f"W&B run kept offline; to upload it: {command}", file=sys.stderr)

    def _init(self, run: Run, mode: Any) -> Any:
        import wandb

        factors = (run.choices[group] for group in ("drafter", "prune") if group in run.choices)
        return wandb.init(
            project=self._project,
            entity=self._entity,
            mode=mode,
            dir=str(self._folder),
            name=" ".join([run.name, *factors]),
            group=self._group,
            job_type="bench",
            tags=tags_of(run),
            config=without_user_paths({**run.config, "origin": run.model_dump(include=set(ORIGIN))}),
            settings=private_settings(),
        )

    def _log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        import wandb

        table: Any = wandb.Table(columns=list(columns), data=[list(row) for row in rows], allow_mixed_types=True)
        # An unbound table is logged as an artifact, with a path below the user's home.
        table.bind_to_run(self._run, name, self._run.step)
        self._run.log({name: table})

    def _log_figures(self, run: Run) -> None:
        import wandb

        if self._draw is None or run.status != "finished":
            return
        drawn = self._draw(run, self._folder)
        if pictures := {f"figures/{path.stem}": wandb.Image(str(path)) for path in drawn}:
            self._run.log(pictures)

    def _log_files(self, run: Run) -> None:
        """Log copies of the record as an artifact, without the user's paths and without traces."""
        import wandb
        from omegaconf import OmegaConf

        copies = self._folder / "wandb" / "record"
        copies.mkdir(parents=True, exist_ok=True)
        (copies / SUMMARY_FILE).write_text(json.dumps(without_user_paths(json.loads(run.model_dump_json())), indent=1))
        (copies / CONFIG_FILE).write_text(OmegaConf.to_yaml(OmegaConf.create(without_user_paths(run.config))))
        for name in (REQUESTS_FILE, ROUNDS_FILE):
            shutil.copyfile(self._folder / name, copies / name)
        artifact = wandb.Artifact(f"run-{self._run.id}-record", type="record")
        for copy in sorted(copies.iterdir()):
            artifact.add_file(str(copy), policy="immutable").local_path = os.path.relpath(copy, self._base())
        self._run.log_artifact(artifact)

    def _base(self) -> Path:
        """Return the directory that paths inside the W&B run are relative to: where an uploading process runs."""
        here = Path.cwd()
        return here if not self._run.offline or self._folder.resolve().is_relative_to(here) else self._folder.resolve()


def tags_of(run: Run) -> list[str]:
    """Return a tag for each factor, such as `drafter=eagle3` or `batch_size=8`, by which W&B can filter and group."""
    factors = {group: name for group, name in run.choices.items() if group not in NOT_FACTORS}
    for key in UNNAMED:
        value: Any = run.config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            factors[key] = str(value)
    return [f"{name}={value}"[:LONGEST_TAG] for name, value in factors.items()]


def without_user_paths(value: Any) -> Any:
    """Return a copy in which absolute paths are cut to their last part; the home and the working directory inside other
    text become `~` and `.`."""
    if isinstance(value, Mapping):
        return {key: without_user_paths(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_user_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    if Path(value).is_absolute():
        return Path(value).name
    places = {str(Path.cwd()): ".", str(Path.home()): "~"}
    for place in sorted(places, key=len, reverse=True):  # the working directory is often inside the home
        value = value.replace(place, places[place]) if place != os.sep else value
    return without_folders(value)


def mode_of_run(mode: str) -> str:
    """Return the mode of a run. `auto` is the value of WANDB_MODE if it is set, else online if there is a key."""
    import wandb

    if mode != "auto":
        return mode
    return os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline")


def describe_wandb_error(error: Exception) -> str:
    """Return W&B's error in one line, without keys."""
    text = one_line(str(error).partition("\n")[0])
    return text.replace(os.environ.get("WANDB_API_KEY") or "\0", "...") or type(error).__name__


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
