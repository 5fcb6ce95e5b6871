"""The page of a W&B project: what it shows is what a run logs, and what saving it needs is said in a line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb

from spec_lab.record.scalars import scalar_paths
from spec_lab.record.time_metrics import STAGES
from spec_lab.record.wandb_sink import WandbSink
from spec_lab.report.saved_plots import run_plots_of
from spec_lab.workspace.__main__ import main
from tests.fake_runs import record_run
from tests.test_wandb import merged, read_offline

pytest.importorskip("wandb_workspaces", reason="needs the extra `workspace`")

PLACE = "a-team/a_project"
METRIC_KEYS = ("metrics", "xAxis", "yAxis", "mediaKeys")


@pytest.fixture
def without_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    wandb.teardown()  # first: put back at the end, the address of a service that is gone would stop later tests
    for name in [name for name in os.environ if name.startswith(("WANDB_", "XDG_")) or name == "NETRC"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    yield
    wandb.teardown()


def panels_of(view: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The panels of each section of a view that was printed."""
    sections = view["spec"]["section"]["panelBankConfig"]["sections"]
    return {section["name"]: section["panels"] for section in sections}


def names_in(view: dict[str, Any]) -> set[str]:
    """Everything logged that a view shows."""
    names: set[str] = set()
    for panel in [panel for panels in panels_of(view).values() for panel in panels]:
        for key in METRIC_KEYS:
            shown = panel["config"].get(key, [])
            names |= {name.removeprefix("summary:") for name in ([shown] if isinstance(shown, str) else shown)}
        if panel["viewType"] == "Weave":
            names.add(panel["config"]["panel2Config"]["exp"]["fromOp"]["inputs"]["key"]["val"])
    columns = view["spec"]["section"]["runSets"][0]["runFeed"]["columnOrder"]
    return names | {column.removeprefix("summary:") for column in columns if column.startswith("summary:")}


def printed_view(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main([PLACE, "--dry-run", "--name", "mine"]) == 0
    view: dict[str, Any] = json.loads(capsys.readouterr().out)
    return view


def test_the_view_has_its_sections_and_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    view = printed_view(capsys)
    assert (view["entity"], view["project"], view["displayName"]) == ("a-team", "a_project", "mine")
    assert list(panels_of(view)) == ["Acceptance", "Speed", "Kernel time"]
    assert all(len(panels) >= 4 for panels in panels_of(view).values())
    stages = {f"stage_ms_per_round.{stage}" for stage in STAGES}
    history = {name for name in names_in(view) if name.startswith(("request", "repeat/", "figures/", "kernel_times"))}
    assert names_in(view) - history - stages <= set(scalar_paths())
    assert stages <= names_in(view)


def test_all_that_the_view_shows_is_logged_by_a_run(
    tmp_path: Path, without_key: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    record_run(Path("run"), [WandbSink("p", draw=run_plots_of)])
    records = read_offline(tmp_path / "run")
    summary = merged(item for record in records for item in record.summary.update)
    history = [merged(record.history.item) for record in records if record.HasField("history")]
    logged = {name for row in history for name in row} | set(summary) | set(scalar_paths())
    assert "verify" in summary["stage_ms_per_round"]
    logged |= {f"stage_ms_per_round.{stage}" for stage in STAGES}
    assert names_in(printed_view(capsys)) - logged == set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["team"], "'team' is not ENTITY/PROJECT; write my-team/spec_lab"),
        (["team/a/b"], "'team/a/b' is not ENTITY/PROJECT"),
        (["/p"], "'/p' is not ENTITY/PROJECT"),
        (["te am/p"], "'te am/p' is not ENTITY/PROJECT"),
        (["../p"], "'../p' is not ENTITY/PROJECT"),
        ([PLACE, "--name", ""], "--name='': a view needs a name"),
        ([], "ENTITY/PROJECT"),
        ([PLACE], "needs a key of W&B's server, and none is configured; set WANDB_API_KEY"),
    ],
)
def test_what_is_missing_is_said_in_a_line(
    arguments: list[str], message: str, without_key: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("refused: ") and message in line


def test_no_server_is_a_line(
    without_key: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert main([PLACE]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "http://127.0.0.1:9 does not answer" in line and "--dry-run" in line
    assert "0" * 40 not in line


def test_a_missing_package_is_a_line_with_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    assert main([PLACE, "--dry-run"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "pip install -c constraints.txt -e '.[workspace]'" in line


def test_a_key_that_is_none_is_refused_before_the_server_is_asked(
    without_key: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "abc123")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert main([PLACE]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("refused: WANDB_API_KEY") and "abc123" not in line
