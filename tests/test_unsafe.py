"""Nothing typed on a command line runs code, and a folder's name is no path."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from spec_lab.__main__ import main
from spec_lab.core.errors import UserError
from spec_lab.doctor.__main__ import main as doctor
from spec_lab.menu.refusals.run import refuse_name, refuse_output_dir
from spec_lab.program.folder import multirun_study, study_place
from spec_lab.program.ground import ground_of
from spec_lab.program.unsafe import refuse_argument
from tests.covering import each_value


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("ran",)


@pytest.fixture
def evil(empty_folder: Path) -> Path:
    path = empty_folder / "evil.pickle"
    path.write_bytes(pickle.dumps(Evil()))
    return path


RUNS_CODE = [
    ["--experimental-rerun", "evil.pickle"],
    ["--experimental-rerun=evil.pickle"],
    ["seed=1", "--experimental-rerun", "evil.pickle"],
    ["+hydra.callbacks.a._target_=os.mkdir", "+hydra.callbacks.a._args_=[ran]"],
    ["+hydra.callbacks.a={_target_:os.mkdir,_args_:[ran]}"],
    ["hydra.callbacks={a: {'_target_': os.mkdir, path: ran}}"],
    ["+hydra.callbacks.a=${oc.create:'{\"\\x5ftarget_\": os.mkdir, path: ran}'}"],
    ["hydra={callbacks:{a:{b:c}}}"],
    ["hydra.launcher._target_=os.mkdir"],
    ["~hydra.launcher", "+hydra.launcher={_target_:os.mkdir,path:ran}"],
    ["-m", "hydra.sweeper._target_=os.mkdir", "+hydra.sweeper.path=ran"],
    ["+hydra.job_logging.handlers.x.()=os.mkdir", "+hydra.job_logging.handlers.x.path=ran"],
    ["hydra.job_logging={version:1,root:{handlers:[x]},handlers:{x:{():os.mkdir,path:ran}}}"],
    ["references=[{_target_:os.mkdir,path:ran}]"],
    ["drafter={_target_:os.mkdir}"],
]


@pytest.mark.parametrize("program", [main, doctor])
@pytest.mark.parametrize("arguments", RUNS_CODE)
def test_what_would_run_code_is_refused_in_a_line(
    arguments: list[str], program: type[int], evil: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("refused: ")
    assert list(evil.parent.iterdir()) == [evil]


@pytest.mark.parametrize(
    "argument",
    [
        "hydra.launcher.setup=[mkdir ran]",
        "+hydra.launcher.additional_parameters.wrap=mkdir",
        "hydra.launcher.comment='a\nmkdir ran'",
    ],
)
def test_what_a_clusters_shell_would_run_is_refused(argument: str) -> None:
    with pytest.raises(UserError, match=r"a shell would run it; write an option .*docs/use"):
        refuse_argument(argument)
    refuse_argument("hydra.launcher.partition=gpu")


@pytest.mark.parametrize("sign", ["", "+", "++"])
@pytest.mark.parametrize("place", ["../../x", "/tmp/x", "${oc.env:HOME}/x", "x", "null"])
@pytest.mark.parametrize("key", ["sweep.subdir", "sweep.dir", "run.dir", "output_subdir", "job.name"])
def test_no_setting_of_hydra_leads_out_of_the_folder_of_a_run(key: str, place: str, sign: str) -> None:
    with pytest.raises(UserError, match="itself names its folders; use output_dir=outputs"):
        refuse_argument(f"{sign}hydra.{key}={place}")


@pytest.mark.parametrize("arguments", [["-m", "seed=1,2", "hydra.sweep.subdir=../../x"], ["hydra.run.dir=../x"]])
def test_what_would_leave_the_folder_makes_none(
    arguments: list[str], empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = empty_folder / "a" / "b"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    assert main(arguments) == 2
    assert [path.name for path in empty_folder.rglob("*")] == ["a", "b"]
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("obstacle", ["file", "nowhere", "loop"])
def test_what_is_no_folder_is_passed_over_where_a_sweep_has_its_own(obstacle: str, tmp_path: Path) -> None:
    study, ground = multirun_study("run", ["seed=1,2"], {}), ground_of([], ())
    place = study_place(tmp_path, study, ground, fresh=False)
    if obstacle == "file":
        place.touch()
    else:
        place.symlink_to(place if obstacle == "loop" else tmp_path / "gone" / "x")
    assert study_place(tmp_path, study, ground, fresh=False) == place.with_name(f"{place.name}-2")
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("argument", ["output_dir=a\0b", "name=\udcff", "workload.path=\udce4.jsonl"])
def test_what_is_no_text_is_refused_in_a_line(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([argument]) == 2
    assert "is not text" in capsys.readouterr().err


def test_settings_of_hydra_that_run_nothing_are_taken(empty_folder: Path) -> None:
    harmless = ["hydra.verbose=true", "hydra.sweeper.max_batch_size=2", "hydra/launcher=basic", "hydra.job.chdir=false"]
    assert main([*harmless, "--dry-run"]) == 0
    (empty_folder / "prompts.jsonl").write_text('{"prompt": "x", "category": "_target_x"}\n')
    of_its_own = ["workload=jsonl", "workload.path=prompts.jsonl", "workload.categories=[_target_x,'a (b)']"]
    assert main([*of_its_own, "--dry-run"]) == 0


PATHS = ["", ".", "..", "../x", "../../x", "/x", "a/b", "a/", ".x", "-x"]
NO_WORDS = [" a", "a\nb", "a\tb", "\x1b[31mred", "a\0b", "\u202eb", "n" * 300, "ü" * 60]


@pytest.mark.parametrize("name", [*PATHS, *NO_WORDS])
def test_a_name_that_is_no_plain_word_is_refused_as_such(name: str) -> None:
    message = refuse_name(name)
    assert message is not None and message.startswith("name=") and message.endswith("name=run")
    assert message.isprintable()


@pytest.mark.parametrize("name", ["run", "my run", "ünïcode-日本", "a.b", "n" * 100])
def test_plain_words_are_names(name: str) -> None:
    assert refuse_name(name) is None


COMMANDS = [[], ["-m", "drafter=ngram,random"], ["experiment=drafters_quick"]]


@pytest.mark.parametrize(("name", "arguments"), each_value(["../../x", "'/x'", "n" * 300], COMMANDS, times=2))
def test_a_refused_name_makes_no_folder_anywhere(
    name: str, arguments: list[str], empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = empty_folder / "a" / "b" / "c"
    assert main([*arguments, f"name={name}", f"output_dir={inside}"]) == 2
    assert not list(empty_folder.iterdir())
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("refused: name=")


def test_a_swept_name_is_refused_without_a_folder_and_the_others_run(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-m", "name=../../x,..,ok", "batch_size=0", "output_dir=out"]) == 2
    assert [path.name for path in empty_folder.iterdir()] == ["out"]
    [sweep] = (empty_folder / "out").iterdir()
    assert [path.name.split("-")[0] for path in sweep.iterdir() if path.is_dir()] == ["ok"]


@pytest.mark.parametrize("place", ["~/runs", "$HOME/runs", "${HOME}/runs"])
def test_what_a_shell_would_have_written_out_names_no_folder(place: str) -> None:
    message = refuse_output_dir(place)
    assert message is not None and message.endswith("write the path in full")
    assert refuse_output_dir(f"a/{place}") is None


@pytest.mark.parametrize("place", ["file", "file/x/y", "link"])
def test_a_folder_that_a_file_stands_in_the_way_of_is_refused_by_a_dry_run_too(
    place: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").touch()
    Path("link").symlink_to("file")
    assert main(["--dry-run", f"output_dir={place}"]) == 2
    assert "is a file); choose another one" in capsys.readouterr().out
