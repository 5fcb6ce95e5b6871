"""The loggers, which may send records to further places than the files: registry entries, keys and refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spec_lab.menu.choices import LoggerMode
from spec_lab.menu.config import LoggerConfig, RunConfig, knob
from spec_lab.menu.option import LoggerOption
from spec_lab.record.wandb_settings import entity_problem, group_problem, key_problem, project_problem, settings_problem

if TYPE_CHECKING:
    from spec_lab.record.sinks import Sink


@dataclass
class WandbConfig(LoggerConfig):
    """logger=wandb: the files, and W&B online or offline."""

    name: str = "wandb"
    project: str = knob("spec_lab", "W&B project")
    entity: str | None = knob(None, "W&B user or team; null is the one of the key")
    mode: LoggerMode = knob(LoggerMode.auto, "where W&B's records go")
    group: str | None = knob(None, "W&B group; null is the sweep's name")


def no_sinks(options: LoggerConfig) -> list[Sink]:
    """Return no sinks, so that only the files are written."""
    return []


def wandb_sinks(options: Any) -> list[Sink]:
    """Return the sink for W&B. Its module is imported here, so that other loggers do not load it."""
    from spec_lab.record.wandb_sink import WandbSink
    from spec_lab.report.saved_plots import run_plots_of

    return [WandbSink(options.project, options.entity, options.mode, options.group, run_plots_of)]


def join_sweep(logger: Any, sweep: str) -> None:
    """Set the sweep's name as the group, if the logger has groups and none was chosen."""
    if getattr(logger, "group", "") is None:
        logger.group = sweep


def wandb_takes_it(config: RunConfig) -> str | None:
    """Refuse names and settings that W&B does not accept, and a mode that needs a key if there is none."""
    logger: Any = config.logger
    return (
        project_problem(logger.project)
        or entity_problem(logger.entity)
        or group_problem(logger.group)
        or settings_problem()
        or key_problem(logger.mode)
    )


ROWS = (
    LoggerOption(name="jsonl", sinks=no_sinks),
    LoggerOption(name="wandb", schema=WandbConfig, sinks=wandb_sinks, refusals=(wandb_takes_it,)),
)
