"""The shape of the sources: one name for one class. The order of imports is `make lint`'s (pyproject.toml)."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
OF_THE_SAME_NAME = ("spec_lab/options/", "spec_lab/record/models.py")
CLASS = re.compile(r"^ *class (\w+)", re.MULTILINE)


def sources() -> list[Path]:
    return sorted(path for package in ("spec_lab", "kernels") for path in (ROOT / package).rglob("*.py"))


def classes_that_stand_twice(files: dict[str, str]) -> dict[str, list[str]]:
    """Class names of several files, with the files, of sources by file name."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, source in files.items():
        for found in CLASS.findall(source):
            places[found].append(name)
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_class_name_stands_twice() -> None:
    """Options have the names of what they build, and records those of what they are records of."""
    named = {str(path.relative_to(ROOT)): path.read_text() for path in sources()}
    own = {name: text for name, text in named.items() if not name.startswith(OF_THE_SAME_NAME)}
    assert classes_that_stand_twice(own) == {}


def imported_names(source: str) -> set[str]:
    """Every module that a source imports, and every name that it takes from one, as module.name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_nothing_is_taken_from_the_package_itself_but_modules() -> None:
    """Beside a clone `spec_lab` is the clone's folder, and has no names (`spec_lab/core/version.py`)."""
    package = ROOT / "spec_lab"
    taken = {
        alias.name
        for path in package.rglob("*.py")
        if "from spec_lab import" in (source := path.read_text())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module == "spec_lab"
        for alias in node.names
    }
    assert {name for name in taken if not (package / name).is_dir() and not (package / f"{name}.py").is_file()} == set()


def test_the_torch_form_of_the_noise_needs_no_triton() -> None:
    """The lab draws its noise from it where there is no triton to import."""
    folder = ROOT / "kernels" / "spec_kernels"
    imported = {
        name for file in ("__init__", "noise_reference") for name in imported_names((folder / f"{file}.py").read_text())
    }
    assert {name.split(".")[0] for name in imported} == {"__future__", "enum", "torch"}
