"""What is installed is what is in the tree, and it runs wherever it is called from."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOT_IN_THE_WHEEL = shutil.ignore_patterns(
    *(".*", "__pycache__", "*.egg-info", "build", "dist", "outputs", "tests", "notebooks", "docs", "wandb")
)
DRY_RUN = [sys.executable, "-m", "spec_lab", "--dry-run", "drafter=ngram", "prune=catchup"]


def run(command: list[str], folder: Path, *paths: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONSAFEPATH": ""}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def assert_composes(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "nothing is refused"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, since building leaves files behind."""
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("copy") / "tree", ignore=NOT_IN_THE_WHEEL))


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*command, "-w", tree / "dist", tree], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [built] = (tree / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's contents and nothing else of ours."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.mark.slow
def test_wheel_holds_every_file_of_the_tree(tree: Path, wheel: Path) -> None:
    """No subpackage, configuration, prompt or weight is left out, and nothing else is in."""
    places = {"spec_lab": "spec_lab", "conf": "spec_lab/conf", "kernels/spec_kernels": "spec_kernels"}
    expected = {
        f"{installed}/{path.relative_to(tree / source)}"
        for source, installed in places.items()
        for path in (tree / source).rglob("*")
        if path.is_file()
    }
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == expected
    assert {"spec_lab/conf/drafter/eagle3.yaml", "spec_lab/conf/train/config.yaml"} <= found


@pytest.mark.slow
def test_wheel_runs_in_an_empty_folder_and_in_the_repository(installed: Path, tree: Path, tmp_path: Path) -> None:
    assert_composes(run(DRY_RUN, tmp_path, installed))
    assert_composes(run(DRY_RUN, tree, installed))


@pytest.mark.slow
def test_wheel_sweeps(installed: Path, tmp_path: Path) -> None:
    done = run([*DRY_RUN[:-2], "-m", "drafter=ngram,none"], tmp_path, installed)
    assert_composes(done)
    assert done.stdout.count("nothing is refused") == 2


@pytest.mark.slow
def test_raw_checkout_runs_in_its_root_and_elsewhere(tree: Path, tmp_path: Path) -> None:
    assert_composes(run(DRY_RUN, tmp_path, tree, tree / "kernels"))
    assert_composes(run(DRY_RUN, tree))


@pytest.mark.slow
def test_kernels_folder_hides_no_package(tree: Path) -> None:
    """An importable `kernels` in the repository's root would stand in front of the one transformers imports."""
    code = "import importlib.util as u; s = u.find_spec('kernels'); print(s is None or s.origin is None)"
    assert run([sys.executable, "-c", code], tree, tree).stdout.strip() == "True"


def test_installed_package_runs_elsewhere(tmp_path: Path) -> None:
    try:
        metadata.distribution("spec-lab")
    except metadata.PackageNotFoundError:
        pytest.skip("a raw checkout: the package is not installed")
    assert_composes(run(DRY_RUN, tmp_path))
    script = Path(sys.executable).with_name("spec-lab")
    assert_composes(run([str(script), *DRY_RUN[3:]], tmp_path))


def test_every_dependency_is_pinned_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["notebook"]]
    wanted += [name for name in project["optional-dependencies"]["dev"] if not name.startswith("spec-lab")]
    names = {re.split(r"[<>=;\[ ]", requirement)[0].lower() for requirement in wanted}
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = [line.partition("==")[0] for line in lines]
    assert all(re.fullmatch(r"[a-z0-9-]+==[a-zA-Z0-9.]+", line) for line in lines)
    assert len(pinned) == len(set(pinned))
    assert names <= set(pinned)


def test_constraints_hold_the_whole_closure() -> None:
    """Every package that an installed dependency needs here is pinned, at the version installed."""
    requirements = pytest.importorskip("packaging.requirements")
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = dict(line.split("==") for line in lines)
    for name in pinned:
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for requirement in map(requirements.Requirement, needs):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                assert re.sub(r"[-_.]+", "-", requirement.name).lower() in pinned, f"{name} needs {requirement.name}"
