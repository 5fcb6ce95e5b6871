"""The loggers, which may send records to further places than the files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_lab.config.choices import LoggerMode
from spec_lab.config.groups import LoggerConfig
from spec_lab.config.option import knob, option

if TYPE_CHECKING:
    from spec_lab.record.recorder import Sink


@option("logger", "jsonl")
class FilesAlone(LoggerConfig):
    """The files in the run's folder, and nothing else."""


@option("logger", "wandb")
class Wandb(LoggerConfig):
    """The files, and W&B online or offline."""

    project: str = knob("spec_lab", "W&B project")
    entity: str | None = knob(None, "W&B user or team; null is the one of the key")
    mode: LoggerMode = knob(LoggerMode.auto, "where W&B's records go")
    group: str | None = knob(None, "W&B group; null is the sweep's name")

    def join_sweep(self, sweep: str) -> None:
        if self.group is None:
            self.group = sweep

    def sinks(self) -> list[Sink]:
        from spec_lab.record.wandb_sink import WandbSink
        from spec_lab.study.figures import draw_run

        return [WandbSink(self.project, self.entity, mode=self.mode, group=self.group, draw=draw_run)]
