"""The shape of the sources: one name for one class, packages and files without circles."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@cache
def parsed(source: str) -> ast.Module:
    """Most sources are looked at by several tests."""
    return ast.parse(source)


def sources() -> list[Path]:
    return sorted(path for package in ("spec_lab", "kernels") for path in (ROOT / package).rglob("*.py"))


def classes_that_stand_twice(files: dict[str, str]) -> dict[str, list[str]]:
    """Class names of several files, with the files, of sources by file name."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, source in files.items():
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_class_name_stands_twice() -> None:
    assert classes_that_stand_twice({str(path.relative_to(ROOT)): path.read_text() for path in sources()}) == {}


def test_every_bench_has_a_help() -> None:
    """Without a parser it would run for minutes, or take `--help` for an override."""
    benches = [path for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()]
    assert len(benches) > 10
    assert [path.name for path in benches if "argparse" not in imported_names(path.read_text())] == []


def test_twins_are_seen_wherever_they_stand() -> None:
    files = {"a.py": "class Head: ...\nclass Other: ...", "b.py": "def make():\n    class Head: ..."}
    assert classes_that_stand_twice(files) == {"Head": ["a.py", "b.py"]}


def imported_names(source: str) -> set[str]:
    """Every module that a source imports, and every name that it takes from one, as module.name."""
    return names_in(parsed(source))


def names_in(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def package_of(module: str) -> str:
    """`spec_lab.engine.graphs.eager` belongs to the package `engine`; a loose module is a package of its own."""
    return module.split(".")[1]


def modules_of_the_lab(source: str) -> set[str]:
    """Modules of spec_lab named by any import of a file, under TYPE_CHECKING or inside a function too."""
    return of_the_lab(imported_names(source))


def of_the_lab(names: set[str]) -> set[str]:
    return {name for name in names if name.startswith("spec_lab.")} - {"spec_lab.__version__"}


def package_graph(files: dict[str, str]) -> dict[str, set[str]]:
    """Which packages each package imports, of sources by module name."""
    graph: dict[str, set[str]] = defaultdict(set)
    for module, source in files.items():
        package = package_of(module)
        graph[package] |= {package_of(name) for name in modules_of_the_lab(source)} - {package}
    return graph


def circle(graph: dict[str, set[str]]) -> tuple[str, ...]:
    """The packages of the first circle there is; an empty tuple where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return tuple(error.args[1])
    return ()


def runtime_imports(source: str) -> set[str]:
    """Modules of spec_lab that a file imports when it runs, at its top or late; not those of TYPE_CHECKING."""
    tree = ast.parse(source)  # its own, since it is changed
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    return of_the_lab(names_in(tree))


def file_graph(files: dict[str, str]) -> dict[str, set[str]]:
    """Which files each file imports, of sources by module name; a name taken from a module stands for that module."""
    graph: dict[str, set[str]] = {}
    for module, source in files.items():
        found = {name if name in files else name.rpartition(".")[0] for name in runtime_imports(source)}
        graph[module] = found & set(files) - {module}
    return graph


def files_by_module() -> dict[str, str]:
    """Sources of spec_lab by module name. A `__main__` is left out: it is a command, which no module imports."""
    files = sorted(path for path in (ROOT / "spec_lab").rglob("*.py") if path.name != "__main__.py")
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text() for path in files}
    return {name.removesuffix(".__init__"): text for name, text in modules.items() if name != "spec_lab.__init__"}


def test_packages_import_one_another_in_no_circle() -> None:
    assert circle(package_graph(files_by_module())) == ()


def test_files_import_one_another_in_no_circle() -> None:
    """An import inside a function would hide one."""
    assert circle(file_graph(files_by_module())) == ()


def test_a_circle_of_files_in_a_package_is_seen_and_one_of_types_alone_is_none() -> None:
    rows = {"spec_lab.menu.registry": "def own():\n    from spec_lab.menu.rows import lookup"}
    back = "from spec_lab.menu import registry"
    types = f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {back}"
    assert circle(file_graph(rows | {"spec_lab.menu.rows.lookup": types})) == ()
    found = circle(file_graph(rows | {"spec_lab.menu.rows.lookup": back}))
    assert set(found) == {"spec_lab.menu.registry", "spec_lab.menu.rows.lookup"}


def test_nothing_is_taken_from_the_package_itself_but_modules() -> None:
    """Beside a clone `spec_lab` is the clone's folder, and has no names (`spec_lab/version.py`)."""
    package = ROOT / "spec_lab"
    taken = {
        alias.name
        for path in package.rglob("*.py")
        for node in ast.walk(parsed(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "spec_lab"
        for alias in node.names
    }
    assert {name for name in taken if not (package / name).is_dir() and not (package / f"{name}.py").is_file()} == set()


def test_no_module_imports_a_command() -> None:
    imported = {name for source in files_by_module().values() for name in modules_of_the_lab(source)}
    assert {name for name in imported if ".__main__" in name} == set()


def test_core_imports_nothing_but_core() -> None:
    assert package_graph(files_by_module())["core"] == set()


@pytest.mark.parametrize(
    "back",
    [
        "from spec_lab.engine.round import DecodeRound",
        "from spec_lab import engine",
        "import spec_lab.engine",
        "if TYPE_CHECKING:\n    from spec_lab.engine import round",
        "def late():\n    import spec_lab.engine.round",
    ],
)
def test_a_circle_is_seen_whatever_kind_of_import_closes_it(back: str) -> None:
    forth = {"spec_lab.engine.round": "from spec_lab.core.types import Request", "spec_lab.core.types": ""}
    assert circle(package_graph(forth)) == ()
    assert set(circle(package_graph(forth | {"spec_lab.core.types": back}))) == {"core", "engine"}


def test_kernels_know_nothing_of_the_lab() -> None:
    imported = {
        name for path in (ROOT / "kernels" / "spec_kernels").rglob("*.py") for name in imported_names(path.read_text())
    }
    assert {name for name in imported if name.startswith("spec_lab")} == set()


def test_the_torch_form_of_the_noise_needs_no_triton() -> None:
    """The lab draws its noise from it where there is no triton to import."""
    folder = ROOT / "kernels" / "spec_kernels"
    imported = {
        name for file in ("__init__", "noise_reference") for name in imported_names((folder / f"{file}.py").read_text())
    }
    assert {name.split(".")[0] for name in imported} == {"__future__", "enum", "torch"}


def test_the_noise_stands_once() -> None:
    """The multiplier of splitmix64 is written in one file: all other forms are made from it."""
    files = [str(path.relative_to(ROOT)) for path in sources() if "0x9e3779b97f4a7c15" in path.read_text().lower()]
    assert files == ["kernels/spec_kernels/noise_reference.py"]
