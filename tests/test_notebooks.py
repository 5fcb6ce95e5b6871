"""The notebooks run from top to bottom, on the runs they ask for and on any others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from spec_lab.core.errors import UserError
from spec_lab.record.reading import find_runs
from spec_lab.study.notebook import newest_study
from tests.fake_runs import CHOICES, MAIN, UNPRUNED, make_begun, measure, record_run

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def record(folder: Path, prune: str, experiment: str | None = None, **changes: Any) -> None:
    choices = CHOICES | {"prune": prune} | ({} if experiment is None else {"experiment": experiment})
    config = {
        "name": "run",
        "batch_size": 1,
        "drafter": {"name": "eagle3", "num_draft_tokens": 3},
        "prune": {"catchup": prune},
    }
    record_run(
        folder,
        begun=make_begun(config, choices=choices, **changes),
        main=measure(MAIN if prune == "catchup" else UNPRUNED),
    )


def executed(path: Path, runs: Path) -> Any:
    """Run a notebook in its own folder, with another folder of runs."""
    notebook = nbformat.read(path, as_version=4)
    [index] = [n for n, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])]
    notebook.cells.insert(index + 1, nbformat.v4.new_code_cell(f"runs_folder = {str(runs)!r}"))
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    ).execute()
    return notebook


def outputs(notebook: Any) -> tuple[str, int]:
    """The text that cells printed, and how many pictures they show."""
    every = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.get("text", "") for output in every)
    return text, sum("image/png" in output.get("data", {}) for output in every)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_on_any_folder_and_say_what_they_cannot_show(path: Path, tmp_path: Path) -> None:
    for prune in ("none", "catchup"):
        record(tmp_path / "sweep" / prune, prune)
    text, pictures = outputs(executed(path, tmp_path))
    missing = {"graph_modes": "has a trace", "relaxed_thinking": "no run has gain"}.get(path.stem)
    assert pictures >= {"graph_modes": 0, "relaxed_thinking": 1}.get(path.stem, 2)
    assert ("cannot be shown:" in text) == (missing is not None) and (missing or "") in text


def test_the_newest_sweep_of_an_experiment_is_taken(tmp_path: Path) -> None:
    record(tmp_path / "old" / "a", "catchup", "pruning", started_at="2026-01-01")
    record(tmp_path / "new" / "a", "catchup", "pruning", started_at="2026-01-02")
    record(tmp_path / "new" / "b", "none", "pruning", started_at="2026-01-02")
    record(tmp_path / "other", "none", started_at="2026-01-03")
    assert [found.folder.parent.name for found in newest_study(tmp_path, "pruning")] == ["new", "new"]
    assert [found.folder.name for found in newest_study(tmp_path, "trees")] == ["other"]
    assert len(newest_study([tmp_path / "old", tmp_path / "other"], "pruning")) == 2
    with pytest.raises(UserError, match="no finished run here or below"):
        newest_study(tmp_path / "nowhere", "pruning")
    assert len(find_runs(tmp_path)) == 4
