"""How a program ends: one line and a code for what is not ours, a traceback for what is."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from importlib import import_module
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from safetensors import SafetensorError

from spec_lab.__main__ import main as spec_lab_main
from spec_lab.cli.session import call_hydra
from spec_lab.core.errors import UserError
from spec_lab.menu import registry
from spec_lab.program.ending import guarded
from spec_lab.program.interrupts import Interrupts
from spec_lab.report.__main__ import main as report
from tests.fake_runs import record_run


def raises(error: BaseException) -> Callable[[], int]:
    def run() -> int:
        raise error

    return run


def wrap_in_resolver(error: Exception) -> Callable[[], int]:
    """As where the folder of a sweep is named inside a configuration: OmegaConf wraps what is raised there."""

    def run() -> int:
        OmegaConf.register_new_resolver("raises", raises(error), replace=True)
        return int(OmegaConf.create({"a": "${raises:}"}).a)

    return run


def broken_conf(folder: Path, text: str) -> Callable[[], int]:
    (folder / "config.yaml").write_text(text)

    def run() -> int:
        call_hydra(lambda _: None, [], folder)
        return 0

    return run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("takes_it", [False, True], ids=["let through", "dropped by a library"])
def test_a_signal_ends_every_program_in_one_line(
    number: signal.Signals, takes_it: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> int:
        with Interrupts(), suppress(KeyboardInterrupt) if takes_it else nullcontext():  # as of a job within a program
            signal.raise_signal(number)
        return 0

    handlers = [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)]
    assert guarded(run, interrupted="it goes on") == 130
    assert capsys.readouterr().err == "it goes on\n"
    assert [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)] == handlers


@pytest.mark.parametrize("error", [UserError("a=3 is odd; use a=4"), KeyError("x")])
def test_a_signal_that_a_library_drops_before_an_error_still_interrupts(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> int:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise error

    assert guarded(run) == 130
    *_, reason, last = capsys.readouterr().err.splitlines()
    assert str(error) in reason and last == "interrupted"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("a=3 is odd;\nuse a=4"), 2, "refused: a=3 is odd; use a=4"),
        (OSError(errno.ENOSPC, "No space left on device", "x.json"), 1, "failed: x.json: No space left on device"),
        (OSError(errno.EFBIG, "File too large"), 1, "failed: File too large"),
        (PermissionError(errno.EACCES, "Permission denied", "x"), 2, "refused: x: Permission denied"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), 1, "failed: I/O error: No space left"),
        (SafetensorError("I/O error: Is a directory (os error 21)"), 2, "refused: I/O error: Is a directory"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "x/y"), 2, "refused: x/y: Not a directory"),
        (OSError(errno.ELOOP, "Too many levels of symbolic links", "x"), 2, "refused: x: Too many levels of"),
        (MemoryError(), 2, "refused: there is not enough memory (nothing is left); lower the sizes"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), 2, "not enough"),
        (RuntimeError("unable to mmap 8 bytes from file <x>: Cannot allocate memory (12)"), 2, "not enough memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."), 2, "not enough memory (CUDA out of memory"),
        (OverflowError("Python int too large to convert to C long"), 2, "refused: a number is too large (Python int"),
    ],
)
def test_what_is_not_ours_is_one_line(
    error: Exception, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(raises(error)) == code
    [printed] = capsys.readouterr().err.splitlines()
    assert line in printed


@pytest.mark.parametrize(
    "error",
    [
        ValueError("too many values to unpack"),
        RuntimeError("out of luck"),
        AssertionError(),
        KeyError("x"),
        OSError("nothing that the system said"),
    ],
)
def test_a_mistake_of_ours_is_a_traceback(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raises(error)) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_file_that_hides_a_library_is_named_even_before_the_program_begins(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("seed = 1\n")
    command = [sys.executable, "-m", "spec_lab", "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"refused: {tmp_path / 'random.py'} hides the library random; rename it")


@pytest.mark.parametrize(("name", "code"), [("wave", 2), ("my_wave", 1)])
def test_only_a_file_with_the_name_of_a_library_hides_one(
    name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{name}.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert guarded(lambda: import_module(name).open) == code
    monkeypatch.delitem(sys.modules, name)


def test_the_traceback_of_an_extension_ends_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether its own code raises, or what that calls; of the lab's own mistakes it says nothing."""
    (tmp_path / "broken_lab").mkdir()
    (tmp_path / "broken_lab" / "__init__.py").write_text("def register(registry):\n    pass\n")
    (tmp_path / "broken_lab" / "drafts.py").write_text("import json\ndef draft():\n    return json.dumps({1})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.load(("broken_lab",))
    assert guarded(import_module("broken_lab.drafts").draft) == 1
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("failed: the traceback passes through the extension broken_lab;")
    assert guarded(raises(KeyError("x"))) == 1
    assert "extension" not in capsys.readouterr().err


def test_a_variable_that_torch_does_not_take_is_refused() -> None:
    variables = {"TORCH_LOGS_FORMAT": "x", "TORCH_LOGS": "-,+"}
    code = (
        "import sys; from spec_lab.program.ending import guarded; sys.exit(guarded(lambda: __import__('torch') and 0))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
    assert done.returncode == 2, done.stderr
    [line] = done.stderr.splitlines()
    assert all(name in line.partition("unset")[2] for name in variables), line


@pytest.mark.parametrize("arguments", [[""], ["--figures", ""], ["--csv="], ["x", ""], ["--html=", "x"]])
def test_an_empty_path_is_not_the_working_folder(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert report(arguments) == 2
    assert "an empty text is not a path" in capsys.readouterr().err


@pytest.mark.parametrize("program", [spec_lab_main, report])
def test_a_working_folder_that_is_gone_is_refused(
    program: Callable[[list[str]], int], empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty_folder.rmdir()
    assert program(["--dry-run"] if program is spec_lab_main else []) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("refused: the working folder does not exist any more")


def test_python_without_docstrings_is_refused() -> None:
    """Records would define their numbers by empty texts."""
    command = [sys.executable, "-OO", "-m", "spec_lab", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("refused: python -OO (or PYTHONOPTIMIZE=2) "), done.stderr
    command = [sys.executable, "-OO", "-c", "import spec_lab; spec_lab.run(spec_lab.compose([]))"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].startswith("spec_lab.core.errors.UserError: python -OO "), done.stderr


def test_ctrl_c_is_not_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raises(KeyboardInterrupt()), interrupted="interrupted; the same command continues") == 130
    assert capsys.readouterr().err == "interrupted; the same command continues\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: [1, 2", "expected ',' or ']'"),
        ("defaults: 3", "refused: "),
        ("- a\n- b\n", "refused: "),
        ("a: ${\n", "refused: "),
        ("hydra: {run: {dir: .}, job_logging: {handlers: 3}}\n", "refused: "),
        ("defaults: [nowhere]\n", "nowhere"),
    ],
)
def test_what_hydra_cannot_read_is_refused_whatever_it_raises(
    text: str, line: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(broken_conf(empty_folder, text)) == 2
    [printed] = capsys.readouterr().err.splitlines()
    assert line in printed


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("output_dir=x is a file; choose another one"), 2, "refused: output_dir=x is a file; choose"),
        (OSError(errno.ENOSPC, "No space left on device", "x"), 1, "failed: x: No space left on device"),
    ],
)
def test_an_error_inside_a_configuration_is_told_as_itself(
    error: Exception, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(wrap_in_resolver(error)) == code
    assert line in capsys.readouterr().err


def test_a_mistake_of_ours_that_hydra_called_is_a_traceback(
    empty_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check of ours that breaks inside a job of Hydra's: frames of ours lie behind those of Hydra."""

    def broken(error: Exception) -> None:
        raise ValueError("too many values to unpack")

    monkeypatch.setattr("spec_lab.cli.task.to_run_config", broken)
    from spec_lab.__main__ import main

    assert main(["seed=3"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that kept what every reader of runs reads."""
    folder = tmp_path_factory.mktemp("kept") / "run"
    record_run(folder)
    return folder


@pytest.mark.parametrize(
    "command",
    [
        "spec_lab drafter=ngram --dry-run",
        "spec_lab.report {run}",
        "spec_lab.show {run} {id}",
    ],
)
def test_a_reader_may_leave_in_the_middle(command: str, kept: Path, empty_folder: Path) -> None:
    """Of any program's own output, not of its help alone. A short one is written at once, so that the reader has to be
    gone before."""
    request = json.loads((kept / "requests.jsonl").read_text().splitlines()[0])["id"]
    typed = command.format(run=kept, id=request)
    line = f"{sys.executable} -m {typed} | head -c 0; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not any(word in done.stderr for word in ("Traceback", "Exception ignored", "Broken pipe")), done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(("code", "logged"), [(0, True), (130, False)])
def test_nothing_is_logged_behind_an_interruption(code: int, logged: bool) -> None:
    """Ctrl-C within an import of torch leaves exit functions that log their statistics, and loggers without levels."""
    program = (
        "import atexit, logging, sys; from spec_lab.program.ending import leave; "
        "logging.basicConfig(level=logging.INFO, stream=sys.stdout); "
        f"atexit.register(logging.info, 'statistics'); print('last'); leave({code})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == code and done.stderr == ""
    assert done.stdout.endswith("statistics\n" if logged else "last\n")
