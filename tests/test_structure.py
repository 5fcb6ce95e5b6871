"""The shape of the sources: one name for one class."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]


def sources() -> list[Path]:
    return sorted(path for package in ("spec_lab", "kernels") for path in (ROOT / package).rglob("*.py"))


def classes_that_stand_twice(files: dict[str, str]) -> dict[str, list[str]]:
    """Class names of several files, with the files, of sources by file name."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, source in files.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_class_name_stands_twice() -> None:
    assert classes_that_stand_twice({str(path.relative_to(ROOT)): path.read_text() for path in sources()}) == {}


def test_twins_are_seen_wherever_they_stand() -> None:
    files = {"a.py": "class Head: ...\nclass Other: ...", "b.py": "def make():\n    class Head: ..."}
    assert classes_that_stand_twice(files) == {"Head": ["a.py", "b.py"]}
