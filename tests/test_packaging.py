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

from spec_lab.record.reading import read_run

ROOT = Path(__file__).parents[1]
LEFTOVERS = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "*.egg-info")
NOT_IN_THE_WHEEL = shutil.ignore_patterns(".*", "build", "dist", "outputs", "tests", "notebooks", "docs", "wandb")
COMMAND = [sys.executable, "-m", "spec_lab"]
COMPOSED = [*COMMAND, "--cfg", "job", "drafter=ngram", "prune=catchup"]
SMOKE = [*COMMAND, "drafter=eagle3", "prune=catchup", "debug=smoke", "num_threads=1", "references=[]"]
SMOKE += ["profile_rounds=0", "repeats=1", "warmup_requests=0"]


def run(command: list[str], folder: Path, *paths: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONSAFEPATH": ""}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def ignore_leftovers(folder: str, names: list[str]) -> set[str]:
    """Name what copying leaves out. Below the root every folder counts."""
    left_out = LEFTOVERS(folder, names)
    return left_out | NOT_IN_THE_WHEEL(folder, names) if Path(folder) == ROOT else left_out


def assert_runs(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    """Check that the run ended well, and that the last line is its folder, relative to where it was started."""
    assert done.returncode == 0, done.stderr
    [summary_file] = (folder / "outputs").glob("*/summary.json")
    assert done.stdout.splitlines()[-1] == str(summary_file.parent.relative_to(folder))
    summary = read_run(summary_file.parent)
    assert summary.status == "finished"
    assert (summary["divergence.requests"], summary["divergence.bugs"]) == (2, 0)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, since building leaves files behind; weights that nothing here reads are empty files."""

    def copy(source: str, target: str) -> None:
        is_read = Path(source).parent.name in ("pocket", "pocket-eagle3")
        if source.endswith(".safetensors") and not is_read:
            Path(target).touch()
        else:
            shutil.copy2(source, target)

    folder = tmp_path_factory.mktemp("copy") / "tree"
    return Path(shutil.copytree(ROOT, folder, ignore=ignore_leftovers, copy_function=copy))


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    """What the hook makes that pip calls."""
    backend = tomllib.loads((tree / "pyproject.toml").read_text())["build-system"]["build-backend"]
    code = f"import {backend}; {backend}.build_wheel('dist')"
    (tree / "dist").mkdir()
    done = run([sys.executable, "-c", code], tree)
    assert done.returncode == 0, done.stderr
    [built] = (tree / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed and nothing else of ours: it has nothing but what is copied."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


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
        licences = {name.rpartition("/")[2] for name in archive.namelist() if ".dist-info/licenses/" in name}
    assert found == expected
    assert licences == {"LICENSE", "NOTICE"}
    assert {
        "spec_lab/conf/drafter/eagle3.yaml",
        "spec_lab/train/card.md.jinja",
        "spec_lab/workloads/openings.tsv",
    } <= found


def test_first_command_works_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    """It is what the README says first, at the size of debug=smoke."""
    code = (
        "import runpy; from importlib import util; "
        f"assert util.find_spec('spec_lab.measure.runner').origin.startswith({str(installed)!r}); "
        "runpy.run_module('spec_lab', run_name='__main__')"
    )
    assert_runs(run([sys.executable, "-c", code, *SMOKE[3:]], tmp_path, installed), tmp_path)


def test_raw_checkout_runs_in_its_root(tree: Path) -> None:
    done = run(COMPOSED, tree)
    assert done.returncode == 0, done.stderr
    assert "catchup: pre_attention" in done.stdout


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
