"""Every notebook is stored without outputs, and runs on records made here."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.util import run_sync

from spec_lab.__main__ import main
from spec_lab.gallery.__main__ import main as gallery
from spec_lab.gallery.export import KERNEL, conclusion_of, execute, read_notebook, run_notebook
from spec_lab.record.reading import read_run
from spec_lab.record.runs import newest_run
from tests import recorded_runner
from tests.test_study import DELTA, STRICT, FakeRun

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tags(cell: Any) -> list[str]:
    return list(cell.metadata.get("tags", []))


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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_begins_with_parameters_and_ends_with_a_conclusion_that_is_computed(path: Path) -> None:
    notebook = read_notebook(path)
    first, last = code_cells(notebook)[0], notebook.cells[-1]
    assert tags(first) == ["parameters"]
    assert tags(last) == ["conclusion"]
    assert last.source.startswith("Markdown(")
    names = [cell.metadata["name"] for cell in notebook.cells if "name" in cell.metadata]
    assert len(names) == len(set(names))


def test_the_gallery_has_every_picture_that_has_a_name_and_no_other() -> None:
    cells = [cell for path in NOTEBOOKS for cell in read_notebook(path).cells]
    names = sorted(cell.metadata["name"] for cell in cells if "name" in cell.metadata)
    assert names == sorted(path.stem for path in (ROOT / "docs" / "gallery").glob("*.png"))


@pytest.fixture
def one_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All notebooks are executed in one kernel that finds the lab, and whose imports they share. It has forgotten the
    names of the one before."""
    place = {"metadata": {"path": str(ROOT / "notebooks")}}
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}")
    manager = NotebookClient(nbformat.v4.new_notebook(), kernel_name=KERNEL).create_kernel_manager()
    shared = NotebookClient(nbformat.v4.new_notebook(), km=manager, resources=place, timeout=300)
    shared.execute()

    def client(notebook: Any, **_: Any) -> NotebookClient:
        shared.nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("%reset -f")])
        shared.execute()
        shared.nb = notebook
        return shared

    monkeypatch.setattr("nbclient.NotebookClient", client)
    yield
    shared.kc.stop_channels()
    run_sync(manager.shutdown_kernel)(now=True)


CHEAP = ["warmup_requests=0", "workload.limit=1", "kernels=torch"]
DECODED = {
    "pruning": ["prune=none,catchup", "drafter.num_draft_tokens=1", "repeats=3", "max_new_tokens=4"],
    "graph_modes": [
        *("graph=eager,round", "batch_size=1", "repeats=1", "references=[]"),
        *("profile_rounds=3", "max_new_tokens=16"),
    ],
}
CONCLUSIONS = {
    "acceptance": r"At K = 2 \*\*\w+\*\* gets the most accepted: \d\.\d\d \(.*`\w+` is the easiest text",
    "pruning": r"\*\*catchup\*\* carries 1\.0 of 2\.0 rows a request round .* Of 1 pruned runs [01] have",
    "graph_modes": r"An eager round is \d{2,3} launches .*\*\*round\*\* makes them \d\.",
    "relaxed_thinking": r"at K = 1 brings the most: [+-]\d+ % .* of 10\. Of 1 relaxed points",
    "kernels": r"Nearest to the roof is \*\*paged attention\*\*(.|\n)* operators make up 80 % of it\.",
}


@pytest.mark.usefixtures("one_kernel")
def test_notebooks_show_records_made_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pruning = ROOT / "notebooks" / "pruning.ipynb"
    assert gallery([str(pruning), "--runs", str(tmp_path), "--out", str(tmp_path / "gallery")]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("refused: pruning.ipynb: ") and "make them with python -m spec_lab" in line
    assert not (tmp_path / "gallery").exists()

    records = tmp_path / "records"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "spec_lab.measure.runner", recorded_runner.stand_in())
        words = ["experiment=drafters", "drafter=ngram,eagle3", "drafter.num_draft_tokens=2"]
        assert main([*words, f"output_dir={records}"]) == 0
    FakeRun(STRICT, 1, [1, 0], wrong=[0]).record(tmp_path / "relaxed" / "strict")
    FakeRun(DELTA, 1, [1, 1], wrong=[0, 1, 2], other=range(9)).record(tmp_path / "relaxed" / "delta")
    for experiment, words in DECODED.items():
        assert main([f"experiment={experiment}", *CHEAP, *words, f"output_dir={records}"]) == 0
    for name, conclusion in CONCLUSIONS.items():
        path = ROOT / "notebooks" / f"{name}.ipynb"
        shown = execute(path, {"runs_folder": str(tmp_path / "relaxed" if name == "relaxed_thinking" else records)})
        named = {cell.metadata["name"] for cell in read_notebook(path).cells if "name" in cell.metadata}
        assert named and set(shown.pictures) == named
        assert all(picture.startswith(b"\x89PNG") for picture in shown.pictures.values())
        assert re.search(conclusion, shown.conclusion), shown.conclusion
        assert "torch" in shown.about
    shows_the_newest_run(records)


def shows_the_newest_run(records: Path) -> None:
    notebook = run_notebook(ROOT / "notebooks" / "first_run.ipynb", {"outputs": str(records)})
    shown = [output for cell in code_cells(notebook) for output in cell.outputs]
    text = "".join(output.text for output in shown if output.output_type == "stream" and output.name == "stdout")
    folder = newest_run(records).folder
    assert sum("image/png" in output.get("data", {}) for output in shown) == 4
    assert str(folder) in text and "acceptance_length_all" in text
    assert conclusion_of(notebook) == read_run(folder).verdict


def test_every_notebook_of_a_study_is_tested() -> None:
    assert {path.stem for path in NOTEBOOKS} == {"first_run", *CONCLUSIONS}
