"""Where records go beside the files: a row for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_lab.assembly.option import LoggerOption
from spec_lab.config import LoggerConfig

if TYPE_CHECKING:
    from spec_lab.record.sinks import Sink


def no_sinks(options: LoggerConfig) -> list[Sink]:
    """The files alone."""
    return []


def wandb_sinks(options: LoggerConfig) -> list[Sink]:
    """W&B, which is imported only here."""
    from spec_lab.record.wandb_sink import WandbSink

    return [WandbSink(options.project, options.entity, options.mode, options.group)]


OPTIONS = (LoggerOption(name="jsonl", sinks=no_sinks), LoggerOption(name="wandb", sinks=wandb_sinks))
