"""The same record in Weights & Biases, online or offline, without anything that tells who ran it or where.

By default W&B records the host, the user's paths, the command line and the console; all of that is switched off, and
absolute paths in the config are cut to their last part. An offline run is whole in itself: it refers to files by their
path relative to the directory named in the message at the end, from which `wandb sync` finds them.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_lab.errors import UserError, without_folders
from spec_lab.record.scalars import scalars
from spec_lab.record.schema import RequestRow, RoundRow, Summary
from spec_lab.record.sinks import CONFIG_FILE, REQUESTS_FILE, ROUNDS_FILE, SUMMARY_FILE, write_config, write_json
from spec_lab.record.wandb_settings import describe_wandb_error, mode_of_run

MODES = ("auto", "online", "offline", "disabled")
INIT_TIMEOUT_SECONDS = 10
REQUESTS_PER_POINT = 8
TAGGED_GROUPS = ("target", "drafter", "acceptance", "prune", "graph", "workload")
TABLE_COLUMNS = (
    "id", "category", "rounds", "acceptance_length", "acceptance_imposed", "output_tokens", "finish_reason", "correct",
    "divergence", "text",
)  # fmt: skip
NOT_RESULTS = ("config", "versions", "choices", "definitions")


class WandbSink:
    """One W&B run for one run of the lab.

    Args:
        mode: `auto` goes online where a key is configured and the server answers in time, else offline; `WANDB_MODE`
            decides if it is set. The other values insist.
        group: of a sweep, None for a single run.

    Raises:
        ValueError: there is no such mode.
    """

    def __init__(self, project: str, entity: str | None = None, mode: str = "auto", group: str | None = None) -> None:
        if mode not in MODES:
            raise ValueError(f"logger.mode={mode} is not known; use one of {', '.join(MODES)}")
        self._project = project
        self._entity = entity
        self._mode = mode
        self._group = group
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
        # They are open and go on being written, but a killed run leaves nothing of them.
        _remove_logs(Path(self._run.dir).parent)
        for axis in ("request", "repeat"):
            self._run.define_metric(f"{axis}/index", hidden=True)
            self._run.define_metric(f"{axis}/*", step_metric=f"{axis}/index", summary="none")

    def round(self, row: RoundRow) -> None:
        """Rounds are too many to log one by one; they go along as a file."""

    def request(self, row: RequestRow) -> None:
        self._num_rounds += len(row["emitted_per_round"])
        self._num_emitted += sum(row["emitted_per_round"])
        self._rows.append(_table_row(row))
        if len(self._rows) % REQUESTS_PER_POINT == 0:
            self._log_progress()

    def finish(self, summary: Summary) -> None:
        if len(self._rows) % REQUESTS_PER_POINT:
            self._log_progress()
        for index, repeat in enumerate(summary["repeats"]):
            self._run.log({"repeat/index": index, **{f"repeat/{key}": value for key, value in repeat.items()}})
        self._log_table(summary["acceptance_imposed"])
        self._log_files(summary)
        self._run.summary.update(
            {key: value for key, value in without_user_paths(summary).items() if key not in NOT_RESULTS}
        )
        # W&B's sweeps find a metric at the top level only, by its whole name.
        self._run.summary.update(scalars(summary))
        directory = Path(self._run.dir).parent
        is_offline = self._run.offline
        self._run.finish(exit_code=0 if summary["status"] == "finished" else 1)
        _remove_logs(directory)
        if is_offline:
            base = self._base()
            command = f"cd {base} && wandb sync {directory.resolve().relative_to(base)}"
            print(f"W&B run kept offline; to upload it: {command}", file=sys.stderr)

    def _open(self, folder: Path, summary: Summary) -> Any:
        import wandb

        try:
            return self._init(folder, summary, mode_of_run(self._mode))
        except (wandb.errors.Error, ValueError) as error:
            problem = describe_wandb_error(error)
            if self._mode != "auto":
                raise UserError(
                    f"logger.mode={self._mode}: W&B cannot be reached ({problem}); use logger.mode=auto or offline"
                ) from error
        print(f"warning: W&B cannot be reached ({problem}); logging offline", file=sys.stderr)
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
            tags=[f"{group}={choices[group]}"[:64] for group in TAGGED_GROUPS if group in choices],
            config=_wandb_config(summary),
            settings=_private_settings(),
        )

    def _log_progress(self) -> None:
        self._run.log(
            {
                "request/index": len(self._rows),
                "request/acceptance_length_all": self._num_emitted / self._num_rounds if self._num_rounds else None,
                "request/emitted_tokens": self._num_emitted,
            }
        )

    def _log_table(self, acceptance_imposed: bool) -> None:
        import wandb

        if self._run.disabled:
            return
        position = TABLE_COLUMNS.index("acceptance_imposed")
        rows = [[*row[:position], acceptance_imposed, *row[position:]] for row in self._rows]
        table: Any = wandb.Table(columns=list(TABLE_COLUMNS), data=rows, allow_mixed_types=True)
        # An unbound table is logged as an artifact of its own, staged under the user's home, whose path then stands in
        # the run. Bound beforehand it goes as a file of the run, with the same panel.
        table.bind_to_run(self._run, "requests", self._run.step)
        self._run.log({"requests": table})

    def _log_files(self, summary: Summary) -> None:
        """The record as an artifact: copies inside the run's own folder, free of the user's paths."""
        import wandb

        copies = self._folder / "wandb" / "record"
        copies.mkdir(parents=True, exist_ok=True)
        clean = without_user_paths(summary)
        write_json(copies / SUMMARY_FILE, clean)
        write_config(copies / CONFIG_FILE, clean["config"])
        for name in (REQUESTS_FILE, ROUNDS_FILE):
            shutil.copyfile(self._folder / name, copies / name)
        artifact = wandb.Artifact(f"run-{self._run.id}-record", type="record")
        for copy in sorted(copies.iterdir()):
            entry = artifact.add_file(str(copy), policy="immutable")
            entry.local_path = os.path.relpath(copy, self._base())
        self._run.log_artifact(artifact)

    def _base(self) -> Path:
        """The directory that paths inside the W&B run are relative to: where an uploading process runs.

        An online run is uploaded from here. An offline one may be uploaded from anywhere, so a run's folder that is not
        below the working directory is its own base.
        """
        here = Path.cwd()
        return here if not self._run.offline or self._folder.resolve().is_relative_to(here) else self._folder.resolve()


def without_user_paths(value: Any) -> Any:
    """A copy in which no string shows where the user's files lie.

    A string that is an absolute path keeps its last part; inside other strings the home and the working directory are
    written `~` and `.`, and every other absolute path keeps its last part.
    """
    if isinstance(value, Mapping):
        return {key: without_user_paths(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_user_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    if Path(value).is_absolute():
        return Path(value).name
    # The longer one first: the working directory often lies in the home.
    places = {str(Path.cwd()): ".", str(Path.home()): "~"}
    for place in sorted(places, key=len, reverse=True):
        value = value.replace(place, places[place]) if place != os.sep else value
    return without_folders(value)


def _wandb_config(summary: Summary) -> dict[str, Any]:
    """The resolved config by its own keys, and beside it what identifies the run."""
    config = dict(without_user_paths(summary["config"]))
    keys = ("choices", "versions", "git_revision", "device", "device_name", "cpu_model", "dtype", "num_threads")
    origin: dict[str, Any] = {key: summary[key] for key in keys}  # type: ignore[literal-required]
    return config | {"origin": origin | {"extensions": summary.get("extensions", {})}}


def _private_settings() -> Any:
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


def _table_row(row: RequestRow) -> list[Any]:
    """The columns that a request itself fills."""
    rounds = len(row["emitted_per_round"])
    divergence = row["divergence"]
    return [
        row["id"],
        row["category"],
        rounds,
        sum(row["emitted_per_round"]) / rounds if rounds else None,
        len(row["output_ids"]),
        row["finish_reason"],
        row["correct"],
        None if divergence is None else divergence["kind"],
        row["text"],
    ]


def _remove_logs(directory: Path) -> None:
    """Drop W&B's own debug logs, which name absolute paths; syncing does not read them."""
    shutil.rmtree(directory / "logs", ignore_errors=True)
