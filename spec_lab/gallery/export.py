"""Executes notebooks and exports their results: pictures, the line about the runs, and the conclusion.

If a cell's metadata have a `name`, its picture is exported under this name. The cell tagged `runs` prints which runs
were loaded. The cell tagged `conclusion` ends in a Markdown object.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_lab.core.errors import UserError, one_line
from spec_lab.record.sinks import replace_bytes, replace_text

INSTALL = "pip install -c constraints.txt -e '.[notebook]'"
KERNEL = "python3"
CELL_TIMEOUT_SECONDS = 300
PARAMETERS, RUNS, CONCLUSION = "parameters", "runs", "conclusion"
NOTEBOOK = re.compile(r"\[`(.+?\.ipynb)`\]")
SECTION = re.compile(r"\n## (?=[^\n]+\n\n\[`[^`]+\.ipynb`\])")
"""Headings that are followed by a link to a notebook; a conclusion may have other headings."""


@dataclass(frozen=True, slots=True)
class Shown:
    """The contents of an executed notebook.

    Attributes:
        title: its first heading.
        about: the line about the runs that it loaded.
        pictures: PNG files by the name of the cell that shows them.
    """

    path: Path
    title: str
    about: str
    pictures: dict[str, bytes]
    conclusion: str


def read_notebook(path: Path) -> Any:
    """Read the notebook in a file.

    Raises:
        UserError: it cannot be read, it is not a notebook that can be exported, or nbformat is not installed.
    """
    try:
        import nbformat
    except ImportError as error:
        raise UserError(f"reading notebooks needs nbformat ({error}); {INSTALL}") from error
    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; name a notebook, such as notebooks/pruning.ipynb") from error
    except Exception as error:  # nbformat may raise anything for odd JSON
        raise UserError(f"{path}: not a notebook ({one_line(error)}); name one that Jupyter opens") from error
    _check_cells(path, notebook)
    return notebook


def _check_cells(path: Path, notebook: Any) -> None:
    """Raise UserError if a notebook with pictures has not one cell for its parameters, or if its first cell is empty. A
    picture's name must also be unique and valid for a file."""
    names = [cell.metadata["name"] for cell in notebook.cells if "name" in cell.metadata]
    if not names:
        return
    wrong = [name for name in names if not isinstance(name, str) or not name.isidentifier() or names.count(name) > 1]
    if wrong:
        raise UserError(f"{path}: a cell has the name {wrong[0]!r}; name each picture once, in letters, digits and _")
    if sum(PARAMETERS in _tags(cell) for cell in _code_cells(notebook)) != 1:
        raise UserError(f"{path}: needs one code cell with the tag {PARAMETERS}, as those in notebooks/ have")
    if not notebook.cells[0].source.strip():
        raise UserError(f"{path}: its first cell is empty; begin with a heading, as those in notebooks/ do")


def set_parameters(notebook: Any, parameters: Mapping[str, str]) -> None:
    """Insert a cell after the one tagged `parameters`, as papermill does. Parameters that the notebook lacks are left
    out."""
    import nbformat

    [index] = [number for number, cell in enumerate(notebook.cells) if PARAMETERS in _tags(cell)]
    known = [name for name in parameters if f"{name} =" in notebook.cells[index].source]
    source = "\n".join(f"{name} = {parameters[name]!r}" for name in known)
    notebook.cells.insert(index + 1, nbformat.v4.new_code_cell(source))


def execute(path: Path, parameters: Mapping[str, str]) -> Shown:
    """Run the notebook with `run_notebook`, and return its results."""
    notebook = run_notebook(path, parameters)
    cells = _code_cells(notebook)
    pictures = {
        cell.metadata["name"]: base64.b64decode(data["image/png"])
        for cell in cells
        if "name" in cell.metadata
        for data in _data(cell)
        if "image/png" in data
    }
    return Shown(
        path,
        title=notebook.cells[0].source.splitlines()[0].lstrip("# "),
        about="".join(_printed(cell) for cell in cells if RUNS in _tags(cell)).strip(),
        pictures=pictures,
        conclusion=conclusion_of(notebook),
    )


def run_notebook(path: Path, parameters: Mapping[str, str]) -> Any:
    """Run the notebook from top to bottom in its own folder with other parameters, and return it with its outputs.

    Raises:
        UserError: it cannot be read, a cell refuses its input, or nbclient is not installed.
    """
    notebook = read_notebook(path)
    try:
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError
    except ImportError as error:
        raise UserError(f"executing notebooks needs nbclient ({error}); {INSTALL}") from error
    set_parameters(notebook, parameters)
    place = {"metadata": {"path": os.fspath(path.parent.resolve())}}
    try:
        NotebookClient(notebook, timeout=CELL_TIMEOUT_SECONDS, kernel_name=KERNEL, resources=place).execute()
    except CellExecutionError as error:
        if error.ename != UserError.__name__:
            raise
        raise UserError(f"{path.name}: {error.evalue}") from error
    return notebook


def conclusion_of(notebook: Any) -> str:
    """Return the text of an executed notebook's conclusion."""
    concluding = [cell for cell in _code_cells(notebook) if CONCLUSION in _tags(cell)]
    texts = [data["text/markdown"] for cell in concluding for data in _data(cell) if "text/markdown" in data]
    return "\n".join(texts)


def has_pictures(notebook: Any) -> bool:
    """Return whether any cell has a picture to export."""
    return any("name" in cell.metadata for cell in notebook.cells)


def _code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _tags(cell: Any) -> Sequence[str]:
    return cell.metadata.get("tags", [])


def _data(cell: Any) -> list[Mapping[str, str]]:
    return [output["data"] for output in cell.outputs if "data" in output]


def _printed(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


def write_gallery(folder: Path, shown: Sequence[Shown], command: str, note: str) -> list[Path]:
    """Write the pictures, and a `README.md` with them, their runs and the conclusions. Return the files.

    An existing page keeps its sections of other notebooks, and its note if there is no new one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for each in shown:
        for name, picture in each.pictures.items():
            files.append(folder / f"{name}.png")
            replace_bytes(files[-1], picture)
    files.append(page := folder / "README.md")
    head, *kept = SECTION.split(page.read_text(encoding="utf-8")) if page.is_file() else [""]
    sections = {found[1]: text.strip() for text in kept if (found := NOTEBOOK.search(text))}
    sections |= {each.path.name: _section(folder, each) for each in shown}
    about = f"What the notebooks show, executed by `{command}`. Text below a picture was computed by its notebook."
    note = note or "\n\n".join(head.strip().split("\n\n")[2:])
    parts = ["# Gallery", about, note, *(f"## {sections[name]}" for name in sorted(sections))]
    replace_text(page, "\n\n".join(part for part in parts if part) + "\n")
    return files


def _section(folder: Path, shown: Shown) -> str:
    link = os.path.relpath(shown.path.resolve(), folder.resolve())
    pictures = [f"![{name.replace('_', ' ')}]({name}.png)" for name in shown.pictures]
    parts = [shown.title, f"[`{shown.path.name}`]({link})", f"```\n{shown.about}\n```", *pictures, shown.conclusion]
    return "\n\n".join(part for part in parts if part)
