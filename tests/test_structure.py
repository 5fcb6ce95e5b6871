"""The shape of the sources: what they import. The order of imports is `make lint`'s (pyproject.toml)."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]


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
