"""The loggers, which may send records to further places than the files: registry entries, keys and refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spec_lab.menu.choices import LoggerMode
from spec_lab.menu.config import LoggerConfig, knob
from spec_lab.menu.option import LoggerOption

if TYPE_CHECKING:
    from spec_lab.record.recorder import Sink


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
    from spec_lab.study.figures import draw_run

    return [WandbSink(options.project, options.entity, options.mode, options.group, draw_run)]


def join_sweep(logger: Any, sweep: str) -> None:
    """Set the sweep's name as the group, if the logger has groups and none was chosen."""
    if getattr(logger, "group", "") is None:
        logger.group = sweep


ROWS = (
    LoggerOption(name="jsonl", sinks=no_sinks),
    LoggerOption(name="wandb", schema=WandbConfig, sinks=wandb_sinks),
)
