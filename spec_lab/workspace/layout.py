"""The contents of a workspace: sections of panels, which read what `logger=wandb` logs by its names.

It is built with W&B's own package `wandb-workspaces`, an optional extra, and not sent anywhere here.
"""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Any

from spec_lab.core.errors import UserError
from spec_lab.record.time_metrics import STAGES

INSTALL = "pip install -c constraints.txt -e '.[workspace]'"
PINNED = (
    "run:tags",
    "summary:summary.acceptance_length",
    "summary:summary.speedup",
    "summary:summary.decode_tokens_per_second",
)
"""Pinned columns of the table of runs; the tags say what ran."""


def build_workspace(entity: str, project: str, name: str) -> Any:
    """Return a `wandb_workspaces.workspaces.Workspace` that is not saved yet.

    Raises:
        UserError: the package is not installed.
    """
    workspaces, panels = _load_library()
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[
            workspaces.Section(name="Acceptance", panels=_acceptance(panels), is_open=True),
            workspaces.Section(name="Speed", panels=_speed(panels), is_open=True),
            workspaces.Section(name="Kernel time", panels=_kernel_time(panels), is_open=True),
        ],
        runset_settings=workspaces.RunsetSettings(pinned_columns=list(PINNED)),
    )


def _load_library() -> tuple[ModuleType, ModuleType]:
    """Return two modules of the package: the one for workspaces and the one for panels."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of its own outdated validators
            import wandb_workspaces.reports.v2 as panels
            import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise UserError(f"spec_lab.workspace needs wandb-workspaces ({error}); {INSTALL}") from error
    return workspaces, panels


def _acceptance(panels: ModuleType) -> list[Any]:
    pictures = ["figures/acceptance_by_position", "figures/acceptance_by_category"]
    return [
        panels.BarPlot(title="Acceptance length", metrics=["summary.acceptance_length"]),
        panels.LinePlot(
            title="Acceptance length so far", x="request/index", y=["request/acceptance_length_all"], title_x="requests"
        ),
        panels.MediaBrowser(title="By draft position and by category", media_keys=pictures, num_columns=2),
        panels.BarPlot(title="Answers that are right", metrics=["summary.accuracy"]),
        panels.WeavePanelSummaryTable(table_name="requests"),
    ]


def _speed(panels: ModuleType) -> list[Any]:
    rates = ["summary.decode_tokens_per_second", "summary.end_to_end_tokens_per_second"]
    return [
        panels.BarPlot(title="Speedup over plain decoding", metrics=["summary.speedup"]),
        panels.ScatterPlot(
            title="Speedup by acceptance length",
            x=panels.SummaryMetric("summary.acceptance_length"),
            y=panels.SummaryMetric("summary.speedup"),
        ),
        panels.BarPlot(title="Tokens a second", metrics=rates),
        panels.LinePlot(
            title="Decode tokens a second, by repeat", x="repeat/index", y=["repeat/decode_tokens_per_second"]
        ),
        panels.BarPlot(title="Time to the first token, p50, ms", metrics=["summary.latency_ms.ttft.p50"]),
    ]


def _kernel_time(panels: ModuleType) -> list[Any]:
    stages = [f"stage_ms_per_round.{stage}" for stage in STAGES]
    return [
        panels.BarPlot(title="Milliseconds a round, by stage", metrics=stages),
        panels.MediaBrowser(title="Stage times beside the references'", media_keys=["figures/stage_times"]),
        panels.BarPlot(
            title="Milliseconds a round: whole, on the GPU",
            metrics=["summary.round_ms", "summary.gpu_busy_ms_per_round"],
        ),
        panels.BarPlot(
            title="Launches and host syncs a round",
            metrics=["summary.launches_per_round", "summary.replays_per_round", "summary.host_syncs_per_round"],
        ),
        panels.WeavePanelSummaryTable(table_name="kernel_times"),
    ]
