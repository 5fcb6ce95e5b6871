"""Where a run may not write, it says so in a line that names output_dir, and makes no folder anywhere."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from spec_lab.__main__ import main
from spec_lab.core.errors import UserError
from spec_lab.program.folder import make_folder
from spec_lab.program.sweep_lock import LOCK_FILE, SweepLock
from spec_lab.record.sinks import SUMMARY_FILE
from tests.covering import each_value
from tests.fake_runner import FakeRunner, summaries

COMMANDS = [[], ["-m", "seed=1,2"]]


def a_file(place: Path) -> None:
    place.touch()


def a_dangling_link(place: Path) -> None:
    place.symlink_to("unmounted/scratch")


def a_loop(place: Path) -> None:
    place.symlink_to(place)


def a_link_to_a_file(place: Path) -> None:
    (place.parent / "file").touch()
    place.symlink_to("file")


@pytest.mark.parametrize(("typed", "arguments"), each_value(["''", "'a\nb'"], COMMANDS))
def test_what_is_no_path_in_a_line_is_refused(
    typed: str, arguments: list[str], runner: FakeRunner, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, f"output_dir={typed}"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("refused: output_dir='") and line.endswith("use one such as output_dir=outputs")
    assert not list(empty_folder.iterdir()) and not runner.calls


@pytest.mark.parametrize(
    ("obstruct", "below", "arguments"),
    each_value([a_file, a_dangling_link, a_loop, a_link_to_a_file], ["", "/two/below"], COMMANDS),
)
def test_what_is_in_the_way_is_named_in_a_line(
    obstruct: Callable[[Path], None],
    below: str,
    arguments: list[str],
    runner: FakeRunner,
    empty_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    obstruct(empty_folder / "way")
    before = sorted(empty_folder.iterdir())
    assert main([*arguments, f"output_dir=way{below}"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"refused: output_dir=way{below} cannot be written (way is a ")
    assert sorted(empty_folder.iterdir()) == before
    assert not runner.calls


@pytest.mark.parametrize(
    ("place", "arguments"), each_value(["/proc/x", "n" * 300, "d/" + "n" * 300, "/proc/self/x/y"], COMMANDS)
)
def test_a_place_that_takes_no_folder_is_refused_in_a_line(
    place: str, arguments: list[str], runner: FakeRunner, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, f"output_dir={place}"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"refused: output_dir={place} cannot be written (")
    assert not runner.calls


@pytest.mark.parametrize(("code", "arguments"), each_value([errno.EACCES, errno.EROFS], COMMANDS))
def test_a_folder_of_somebody_else_is_refused_in_a_line(
    code: int,
    arguments: list[str],
    runner: FakeRunner,
    empty_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def mkdir(path: str, *_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(os, "mkdir", mkdir)
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == f"refused: output_dir=outputs cannot be written ({os.strerror(code)}); choose another one"


def test_a_folder_has_its_record_from_the_first_moment(tmp_path: Path) -> None:
    """Whoever looks while it is made sees no folder, or one with all that is in it."""
    seen: list[set[str]] = []
    made = threading.Event()

    def write(folder: Path) -> None:
        (folder / SUMMARY_FILE).write_text("{}")
        seen.append({path.name for path in tmp_path.glob("[!.]*")})
        made.set()

    assert make_folder(tmp_path, "run", write) == tmp_path / "run"
    assert seen == [set()]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("there", "left"), [((), ()), (("one",), ("one",)), (("one/two/mine",), ("one", "one/two", "one/two/mine"))]
)
def test_a_run_that_is_refused_leaves_no_folder_that_it_made(
    there: tuple[str, ...], left: tuple[str, ...], runner: FakeRunner, empty_folder: Path
) -> None:
    for folder in there:
        Path(folder).mkdir(parents=True)
    runner.begins, runner.error = False, UserError("target.path=x holds no checkpoint; use another")
    assert main(["output_dir=one/two"]) == 2
    assert sorted(empty_folder.rglob("*")) == [empty_folder / name for name in left]


@pytest.mark.parametrize("taken", ["folder", "empty folder", "file", "dangling link"])
def test_a_name_that_is_taken_by_anything_gets_a_number(taken: str, tmp_path: Path) -> None:
    place = tmp_path / "run"
    if taken == "file":
        place.touch()
    elif taken == "dangling link":
        place.symlink_to("nowhere")
    else:
        make_folder(tmp_path, "run", lambda folder: taken == "folder" and (folder / "x").touch())
    assert make_folder(tmp_path, "run", lambda _: None) == tmp_path / "run-2"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space"), KeyboardInterrupt(), ValueError()])
def test_a_folder_whose_record_cannot_be_written_is_not_left_behind(error: BaseException, tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "part").touch()
        raise error

    with pytest.raises(type(error)):
        make_folder(tmp_path, "run", write)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("sweep", "remedy"),
    [
        ("seed=range(0,0)", "give every key at least one value"),
        ("drafter=glob(nope*)", "drafter takes eagle3"),
        ("batch_size=range(3,1)", "give every key at least one value"),
    ],
)
@pytest.mark.parametrize("arguments", [[], ["repeats=1,2"], ["fresh=true"]])
def test_a_sweep_without_a_job_is_refused_in_a_line(
    sweep: str,
    remedy: str,
    arguments: list[str],
    runner: FakeRunner,
    empty_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["-m", sweep, *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"refused: {sweep} selects no job; {remedy}")
    assert not [path for path in empty_folder.rglob("*") if path.is_file()]
    assert not (empty_folder / "outputs").exists()


def test_the_same_sweep_twice_at_once_is_refused_the_second_time(
    runner: FakeRunner, empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second is a process of its own, begun while the first runs its first job."""
    command = ["-m", "seed=1,2"]
    done: list[subprocess.CompletedProcess[str]] = []
    run = runner.run

    def run_beside(*arguments: object) -> object:
        if not done:
            code = [sys.executable, "-m", "spec_lab", *command]
            done.append(subprocess.run(code, capture_output=True, text=True))
        return run(*arguments)  # type: ignore[arg-type]

    sys.modules["spec_lab.measure.runner"].run = run_beside  # type: ignore[attr-defined]
    assert main(command) == 0
    assert done[0].returncode == 2
    [line] = done[0].stderr.splitlines()
    assert "is a sweep that another process is running" in line
    [sweep] = (empty_folder / "outputs").iterdir()
    assert len(summaries(sweep)) == 2
    assert json.loads((sweep / "sweep.json").read_text())["jobs"] == 2
    assert not (sweep / LOCK_FILE).exists()


def test_a_lock_dies_with_its_process(tmp_path: Path) -> None:
    takes = "import os, sys, pathlib; from spec_lab.program.sweep_lock import SweepLock;"
    takes += "SweepLock(pathlib.Path(sys.argv[1])).take(); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", takes, str(tmp_path)]).returncode == 9
    assert (tmp_path / LOCK_FILE).exists()
    SweepLock(tmp_path).take()


def test_a_dry_run_beside_a_sweep_takes_nothing_from_it(runner: FakeRunner, empty_folder: Path) -> None:
    codes: list[int] = []
    run = runner.run

    def run_beside(*arguments: object) -> object:
        code = [sys.executable, "-m", "spec_lab", "-m", "seed=1", "--dry-run"]
        codes.append(subprocess.run(code, capture_output=True).returncode)
        return run(*arguments)  # type: ignore[arg-type]

    sys.modules["spec_lab.measure.runner"].run = run_beside  # type: ignore[attr-defined]
    assert main(["-m", "seed=1"]) == 0
    assert codes == [0]


def test_a_dry_run_makes_no_folder(empty_folder: Path) -> None:
    assert main(["-m", "seed=1,2", "--dry-run"]) == 0
    assert not list(empty_folder.iterdir())
