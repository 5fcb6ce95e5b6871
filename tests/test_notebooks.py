"""Every notebook is stored without outputs and runs on the record of a run made here."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from spec_lab.measure.runner import run
from tests.fake_runs import CHOICES, record_run
from tests.tiny_runs import make_run_config, make_runnable_pair, write_prompts

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def read_notebook(path: Path) -> Any:
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def set_parameters(notebook: Any, **parameters: Any) -> None:
    """Put a cell behind the one tagged `parameters`, as papermill does."""
    [index] = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])]
    source = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
    notebook.cells.insert(index + 1, nbformat.v4.new_code_cell(source))  # type: ignore[no-untyped-call]


def execute(notebook: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}")
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_without_outputs(path: Path) -> None:
    notebook = read_notebook(path)
    nbformat.validate(notebook)
    for cell in code_cells(notebook):
        assert cell.outputs == []
        assert cell.execution_count is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_thin(path: Path) -> None:
    """A notebook loads, calls the library and shows: what computes belongs where it can be tested."""
    for cell in code_cells(read_notebook(path)):
        python = "\n".join(line for line in cell.source.splitlines() if not line.startswith("%"))
        computing = (ast.FunctionDef, ast.ClassDef, ast.For, ast.While, ast.comprehension)
        assert not [node for node in ast.walk(ast.parse(python)) if isinstance(node, computing)]


def show_first_run(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """Run `first_run.ipynb` on the newest run below `outputs`; return its text and the number of its plots."""
    notebook = read_notebook(ROOT / "notebooks" / "first_run.ipynb")
    set_parameters(notebook, outputs=str(outputs))
    execute(notebook, outputs.parent, monkeypatch)
    shown = [output for cell in code_cells(notebook) for output in cell.outputs]
    images = [output for output in shown if "image/png" in output.get("data", {})]
    text = "".join(output.text for output in shown if output.output_type == "stream" and output.name == "stdout")
    return text, len(images)


@pytest.mark.slow
def test_first_run_shows_a_fabricated_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "outputs" / "a-run"
    record_run(folder)
    text, num_images = show_first_run(tmp_path / "outputs", monkeypatch)
    assert num_images == 4
    assert str(folder) in text
    assert "times as fast as plain decoding" in text
    assert "acceptance_length_all" in text


@pytest.mark.slow
def test_first_run_shows_a_run_made_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"id": str(i), "category": "ab"[i % 2], "prompt": "walk" * (i + 1), "form": "continue"} for i in range(3)]
    pair = make_runnable_pair(tmp_path / "pair")
    prompts = write_prompts(tmp_path / "prompts.jsonl", rows)
    folder = tmp_path / "outputs" / "a-run"
    folder.mkdir(parents=True)
    summary = run(make_run_config(pair, prompts, prune="catchup", profile_rounds=2), CHOICES, folder)
    text, num_images = show_first_run(tmp_path / "outputs", monkeypatch)
    assert num_images == 4
    assert str(folder) in text
    assert summary["verdict"] in " ".join(text.split())
    assert "acceptance_length_all" in text
