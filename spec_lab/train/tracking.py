"""Logs a training to Weights & Biases, online or offline, without data on who ran it or where."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spec_lab.core.errors import UserError
from spec_lab.record.wandb_sink import (
    describe_wandb_error,
    mode_of_run,
    private_settings,
    remove_logs,
    without_user_paths,
)
from spec_lab.train.config import TrainConfig
from spec_lab.train.truth import Tracker


@dataclass(frozen=True, slots=True)
class WandbTracker:
    """Logs a training to W&B. `step` is a separate axis, since a resumed training logs some steps again."""

    run: Any

    def log(self, step: int, figures: Mapping[str, float | None]) -> None:
        self.run.log({"step": step, **{name: value for name, value in figures.items() if value is not None}})


@contextmanager
def tracked(config: TrainConfig, folder: Path, name: str) -> Iterator[Tracker | None]:
    """Open W&B's run of a training in `folder`; yield None if `logger.project` names no project.

    Raises:
        UserError: W&B cannot start with these settings.
    """
    if config.logger.project is None:
        yield None
        return
    run = _open(config, folder, name)
    run.define_metric("step", hidden=True, summary="none")
    run.define_metric("*", step_metric="step")
    exit_code = 1
    try:
        yield WandbTracker(run)
        exit_code = 0
    finally:
        run.finish(exit_code=exit_code)
        remove_logs(Path(run.dir).parent)
        if run.offline:
            print(f"W&B run kept offline; to upload it: wandb sync {Path(run.dir).parent}", file=sys.stderr)


def _open(config: TrainConfig, folder: Path, name: str) -> Any:
    import wandb

    try:
        return wandb.init(
            project=config.logger.project,
            entity=config.logger.entity,
            mode=mode_of_run(str(config.logger.mode)),  # type: ignore[arg-type]
            dir=str(folder),
            name=name,
            job_type="train",
            config=without_user_paths(asdict(config)),
            settings=private_settings(),
        )
    except (wandb.errors.Error, ValueError) as error:
        raise UserError(
            f"logger.mode={config.logger.mode}: W&B cannot start ({describe_wandb_error(error)}); "
            "use logger.mode=offline, or logger.project=null"
        ) from error
