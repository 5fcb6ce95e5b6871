"""Sends the record that a run's files hold to Weights & Biases, online or offline.

What is sent does not say who ran it or where. By default W&B records the host, the user's paths, the command line and
the console; all of that is switched off, and absolute paths are cut to their last part. An offline run refers to files
by relative paths, which `wandb sync` finds from the directory that is named at the end.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_lab.core.errors import UserError, without_folders
from spec_lab.record.metric import ratio
from spec_lab.record.names import REQUESTS_FILE, ROUNDS_FILE
from spec_lab.record.recorder import write_run
from spec_lab.record.trace import Kernel

if TYPE_CHECKING:
    from spec_lab.record.models import Run

PRIVATE = {
    "console": "off",
    "disable_git": True,
    "host": "not recorded",
    "init_timeout": 10,
    "program": "spec_lab",
    "save_code": False,
    "silent": True,
    "symlink": False,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}
"""Settings with which W&B records nothing about the machine and its user."""
LONGEST_TAG = 64
NOT_FACTORS = ("logger", "size", "debug")
UNNAMED = ("drafter.num_draft_tokens", "batch_size", "kernels", "recurrent.rollback")
"""Knobs that a study or a sweep may vary, but that are in no group's tag."""
REQUEST_COLUMNS = (
    "id", "category", "rounds", "acceptance_length_all", "output_tokens", "finish_reason", "correct", "divergence",
    "text", "acceptance_imposed",
)  # fmt: skip
RESULTS = ("status", "reason", "verdict", "repeats", "by_category", "references")
ORIGIN = ("choices", "engine", "engine_version", "target", "machine")

Draw = Callable[["Run", Path], Iterable[Path]]
"""Saves figures of a finished run, with its requests from a folder, and returns their files."""


@dataclass
class WandbSink:
    """One W&B run for one run of the lab.

    Attributes:
        mode: `auto` is `WANDB_MODE`, else online if a key is configured; where W&B cannot start so, the run is logged
            offline, with a warning. With another mode the run is then refused.
        group: None is `WANDB_RUN_GROUP`, else the sweep of W&B's own agent, else no group.
        draw: draws the run's figures; None logs none.
    """

    project: str
    entity: str | None = None
    mode: str = "auto"
    group: str | None = None
    draw: Draw | None = None
    _folder: Path = field(init=False)
    _run: Any = field(init=False)

    def start(self, folder: Path, run: Run) -> None:
        """Open the W&B run.

        Raises:
            UserError: W&B cannot start in the mode that was asked for.
        """
        import wandb

        self._folder = folder
        usual = os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline")
        try:
            self._run = self._init(run, usual if self.mode == "auto" else self.mode)
        except (wandb.errors.Error, ValueError) as error:
            secret = os.environ.get("WANDB_API_KEY") or "\0"
            problem = str(error).partition("\n")[0].replace(secret, "...") or type(error).__name__
            if self.mode != "auto":
                raise UserError(f"logger.mode={self.mode}: W&B cannot start ({problem}); use logger=jsonl") from error
            print(f"warning: W&B cannot start ({problem}); logging offline", file=sys.stderr)
            self._run = self._init(run, "offline")
        self._remove_logs()  # now, so that none is left if the run is killed

    def finish(self, run: Run) -> None:
        import wandb

        told = without_user_paths(run.model_dump())
        if not self._run.disabled:
            self._log_tables(run)
            drawn = self.draw(run, self._folder) if self.draw is not None and run.status == "finished" else ()
            self._run.log({f"figures/{path.stem}": wandb.Image(str(path)) for path in drawn})
            self._log_files(told)
        self._run.summary.update({name: told[name] for name in RESULTS})
        # W&B's sweeps find a metric only by its whole name, at the top level.
        self._run.summary.update(run.scalars())
        self._run.finish(exit_code=0 if run.status == "finished" else 1)
        self._remove_logs()
        if self._run.offline:
            command = f"cd {self._folder.resolve()} && wandb sync wandb/{Path(self._run.dir).parent.name}"
            print(f"W&B run kept offline; to upload it: {command}", file=sys.stderr)

    def _remove_logs(self) -> None:
        """Delete W&B's debug logs, which contain absolute paths. Syncing does not need them."""
        shutil.rmtree(Path(self._run.dir).parent / "logs", ignore_errors=True)

    def _init(self, run: Run, mode: Any) -> Any:
        import wandb

        factors = (run.choices[group] for group in ("drafter", "prune") if group in run.choices)
        told = without_user_paths(run.model_dump())
        return wandb.init(
            project=self.project,
            entity=self.entity,
            mode=mode,
            dir=str(self._folder),
            name=" ".join([run.name, *factors]),
            group=self.group or os.environ.get("WANDB_RUN_GROUP") or os.environ.get("WANDB_SWEEP_ID"),
            job_type="bench",
            tags=tags_of(run),
            config={**told["config"], "origin": {name: told[name] for name in ORIGIN}},
            settings=PRIVATE,
        )

    def _log_tables(self, run: Run) -> None:
        from spec_lab.record.reading import read_requests

        rows = []
        for request in read_requests(self._folder):
            emitted, parted = request.emitted_per_round or [], request.divergence
            counted = len(emitted), ratio(sum(emitted), len(emitted)), len(request.output_ids)
            answered = request.finish_reason, request.correct, parted and parted.kind, request.text
            rows.append((request.id, request.category, *counted, *answered, run.acceptance_imposed))
        self._log_table("requests", REQUEST_COLUMNS, rows)
        self._log_table("kernel_times", [each.name for each in fields(Kernel)], list(map(astuple, run.kernels)))

    def _log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        import wandb

        table: Any = wandb.Table(columns=list(columns), data=[list(row) for row in rows], allow_mixed_types=True)
        # An unbound table is logged as an artifact, with a path below the user's home.
        table.bind_to_run(self._run, name, self._run.step)
        self._run.log({name: table})

    def _log_files(self, told: Mapping[str, Any]) -> None:
        """Log copies of the record as an artifact, without the user's paths and without traces."""
        import wandb

        from spec_lab.record.models import Run

        copies = self._folder / "wandb" / "record"
        write_run(copies, Run(**told))
        for name in (REQUESTS_FILE, ROUNDS_FILE):
            shutil.copyfile(self._folder / name, copies / name)
        artifact = wandb.Artifact(f"run-{self._run.id}-record", type="record")
        base = self._folder if self._run.offline else Path.cwd()  # where an uploading process runs
        for copy in sorted(copies.iterdir()):
            artifact.add_file(str(copy), policy="immutable").local_path = os.path.relpath(copy, base)
        self._run.log_artifact(artifact)


def tags_of(run: Run) -> list[str]:
    """Return a tag for each factor, such as `drafter=eagle3` or `batch_size=8`, by which W&B can filter and group."""
    from omegaconf import OmegaConf

    factors = {group: name for group, name in run.choices.items() if group not in NOT_FACTORS}
    config = OmegaConf.create(run.config)
    knobs = {key: OmegaConf.select(config, key) for key in UNNAMED}
    factors |= {key: str(value) for key, value in knobs.items() if value is not None}
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
