"""A study goes on as long as what it runs on is the same, and says what has changed where it starts over."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from spec_lab.__main__ import main
from spec_lab.program.folder import multirun_study, study_place
from spec_lab.program.ground import NUM_PIECES, PIECE, READ_WHOLE, changes, ground_of
from tests.fake_runner import FakeRunner

STUDY = ["target=hf", "target.path=mine/model", "workload=jsonl", "workload.path=prompts.jsonl", "drafter=none"]


def write(path: str, content: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(content)


@pytest.fixture
def module(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An extension of one's own, beside weights and prompts."""
    monkeypatch.syspath_prepend(str(empty_folder))
    write("mine/model/config.json", "{}")
    write("mine/model/model.safetensors", "weights")
    write("prompts.jsonl", '{"prompt": "a"}')
    name = f"of_{empty_folder.name}"
    write(f"{name}.py", "def register(registry):\n    pass\n")
    return name


def test_what_is_not_read_may_change(module: str) -> None:
    before = ground_of(STUDY, (module,))
    for path in ("notebooks/mine.ipynb", "mine/model/runs/log.txt", "mine/a.txt"):
        write(path, "changed")
    os.utime("mine/model/model.safetensors", (1, 1))
    assert changes(before, ground_of(STUDY, (module,))) is None


def test_two_paths_of_one_key_that_end_alike_are_both_read(empty_folder: Path) -> None:
    typed = ["drafter.path=a/best.json,b/best.json"]
    for folder in "ab":
        write(f"{folder}/best.json", "{}")
    before = ground_of(typed, ())
    for folder in "ab":
        write(f"{folder}/best.json", "changed")
        assert changes(before, ground_of(typed, ())) == "drafter.path=best.json"
        write(f"{folder}/best.json", "{}")


COMPOSED = {"target": {"path": "mine/model"}, "workload": {"path": "prompts.jsonl"}}
READ = {
    "mine/model/model.safetensors": "target.path=model",
    "mine/model/config.json": "target.path=model",
    "mine/model/a_second_file.json": "target.path=model",
    "prompts.jsonl": "workload.path=prompts.jsonl",
    "MODULE.py": "MODULE",
}


@pytest.mark.parametrize(
    ("content", "paths"), [(STUDY, list(READ)), (COMPOSED, ["mine/model/config.json", "prompts.jsonl"])]
)
def test_what_is_read_is_named_when_it_has_changed(content: Any, paths: list[str], module: str) -> None:
    """As it was typed, or as an experiment composed it."""
    before = ground_of(content, (module,))
    for path in paths:
        write(path.replace("MODULE", module), "changed")
        now = ground_of(content, (module,))
        assert changes(before, now) == READ[path].replace("MODULE", module)
        before = now


def test_a_study_says_what_has_changed(
    empty_folder: Path, module: str, runner: FakeRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    def again() -> tuple[int, str]:
        capsys.readouterr()
        main(["-m", "seed=1", *STUDY, f"extensions=[{module}]"])
        said = [line for line in capsys.readouterr().err.splitlines() if "starts over" in line]
        return len(list(Path("outputs").iterdir())), " ".join(said)

    assert again() == again() == (1, "")
    write("prompts.jsonl", '{"prompt": "b"}')
    number, said = again()
    assert number == 2 and "workload.path=prompts.jsonl" in said
    assert again() == (2, "")
    write("prompts.jsonl", '{"prompt": "a"}')
    assert again() == (2, ""), "what it was is found again"


@pytest.mark.parametrize("content", [None, "[1", "5"])
def test_records_that_do_not_say_what_they_stand_on_are_left_alone(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder without any record is one that has not begun."""
    study, ground = multirun_study("run", ["seed=1,2"], {}), ground_of([], ())
    place = study_place(tmp_path, study, ground, fresh=False)
    place.mkdir()
    if content is not None:
        (place / "stands_on.json").write_text(content)
    assert study_place(tmp_path, study, ground, fresh=False) == place
    (place / "job").mkdir()
    (place / "job" / "summary.json").touch()
    assert study_place(tmp_path, study, ground, fresh=False) == place.with_name(f"{place.name}-2")
    assert f"{place.name} does not record its ground" in capsys.readouterr().err


def test_the_package_and_its_configuration_are_part_of_it() -> None:
    ground = ground_of([], ())
    assert {"spec_lab/engine/round.py", "spec_lab/workloads/prompts/code.jsonl", "torch"} <= ground.keys()
    assert {"conf/config.yaml", "spec_lab/zoo/pocket/model.safetensors"} <= ground.keys()
    assert any(name.startswith("spec_kernels/native/") for name in ground)
    assert not any("__pycache__" in name for name in ground)


def test_large_weights_are_told_apart_without_reading_them_whole(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with file.open("wb") as opened:
        opened.truncate(4 * READ_WHOLE)
    before = ground_of([f"target.path={tmp_path}"], ())
    with file.open("r+b") as opened:
        for index in range(0, 4 * READ_WHOLE, 4 * READ_WHOLE // NUM_PIECES - PIECE):
            opened.seek(index)
            opened.write(b"trained" * 100)
    assert changes(before, ground_of([f"target.path={tmp_path}"], ())) == f"target.path={tmp_path.name}"


def test_the_folder_of_a_study_names_no_place_of_this_machine(empty_folder: Path, runner: FakeRunner) -> None:
    assert main(["-m", "seed=1", f"workload.path={empty_folder}/prompts.jsonl", "workload=jsonl"]) == 2
    assert main(["-m", "seed=1"]) == 0
    files = [path for path in Path("outputs").glob("*/*") if path.is_file()]
    assert {"multirun.yaml", "stands_on.json", "sweep.json"} <= {path.name for path in files}
    for path in files:
        assert str(empty_folder) not in path.read_text()
        assert str(Path(__file__).parents[1]) not in path.read_text(), path
