"""`python -m spec_lab` as a user sees it: exit codes, messages, folders. The run itself is a fake."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spec_lab import __version__
from spec_lab.__main__ import main
from spec_lab.core.errors import UserError
from spec_lab.menu.config import RunConfig
from spec_lab.program.sweep_lock import was_left
from spec_lab.record.sinks import SUMMARY_FILE
from tests.fake_runner import FakeRunner, summaries


def last_line(text: str) -> str:
    return text.rstrip("\n").rpartition("\n")[2]


def test_run_ends_with_its_folder(runner: FakeRunner, empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drafter=ngram", "prune=catchup"]) == 0
    [(config, choices, folder)] = runner.calls
    assert config.drafter.name == "ngram"
    assert choices["prune"] == "catchup"
    assert folder.parent == empty_folder / "outputs"
    assert folder.name.startswith("run-pocket-ngram-strict-catchup-eager-")
    assert last_line(capsys.readouterr().out) == f"outputs/{folder.name}"


def test_same_run_again_gets_a_folder_of_its_own(runner: FakeRunner, empty_folder: Path) -> None:
    assert [main([]), main([])] == [0, 0]
    names = [folder.name for _, _, folder in runner.calls]
    assert names == [names[0], f"{names[0]}-2"]
    assert len(summaries(empty_folder / "outputs")) == 2


def test_absolute_output_dir_is_taken_as_it_is(
    runner: FakeRunner, empty_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    assert main([f"output_dir={elsewhere}"]) == 0
    assert runner.calls[0][2].parent == elsewhere
    assert not list(empty_folder.iterdir())


def test_the_remedy_for_a_path_with_a_comma_is_one_value(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty_folder / "step,100").mkdir()
    assert main(["target=hf", "target.path=step,100", "drafter=ngram"]) == 2
    [word] = shlex.split(capsys.readouterr().err.partition("; type ")[2])
    assert main(["target=hf", word, "drafter=ngram"]) == 2
    assert "step,100: has no config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["drafter.num_draft_tokens=0"], "use drafter=none or drafter.num_draft_tokens=3"),
        (["batch_size=0"], "use batch_size=1"),
        (["batchsize=3"], "did you mean batch_size?"),
        (["+batchsize=3"], "did you mean batch_size?"),
        (["batch_size=two"], "batch_size takes a whole number"),
        (["drafter=none", "drafter.max_ngram=3"], "leave it out or choose drafter=ngram"),
        (["drafter=eagle3,ngram"], "add -m to run them all"),
        (
            ["-m", "experiment=drafters_quick,pruning"],
            "experiment=drafters_quick is a sweep of its own; start one after",
        ),
        (["batch_size=???"], "set batch_size="),
        (["batch_size=${nope}"], "Interpolation key 'nope' not found"),
        (["hydra.nope=3"], "hydra.nope"),
        (["--run", "-m"], "Only one of --run, --multirun"),
        (["-m", "batch_size=1,two"], "batch_size takes a whole number"),
        (["-m", "drafter=oracle,eagle3", "drafter.max_ngram=3"], "none of oracle, eagle3 reads it"),
    ],
)
def test_refused_run_leaves_one_line_and_nothing_else(
    arguments: list[str],
    message: str,
    runner: FakeRunner,
    empty_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("refused: ")
    assert message in line
    assert not [path for path in empty_folder.rglob("*") if path.is_file()]
    assert not runner.calls


def test_mistake_found_while_loading_leaves_one_line_and_nothing_else(
    runner: FakeRunner, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner.begins, runner.error = False, UserError("the head is for hidden size 256;\nuse drafter.path=...")
    assert main([]) == 2
    assert capsys.readouterr().err == "refused: the head is for hidden size 256; use drafter.path=...\n"
    assert not summaries(empty_folder)


@pytest.mark.parametrize(("begins", "error"), [(False, ValueError("too many values")), (True, RuntimeError())])
def test_failed_run_shows_its_traceback_and_keeps_a_record(
    begins: bool, error: Exception, runner: FakeRunner, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner.begins, runner.error = begins, error
    assert main([]) == 1
    captured = capsys.readouterr()
    assert "Traceback" in captured.err
    assert type(error).__name__ in captured.err
    [(name, summary)] = summaries(empty_folder).items()
    assert last_line(captured.out) == f"outputs/{name}"
    if not begins:
        assert (summary["status"], summary["reason"]) == ("failed", "ValueError: too many values")


def test_what_cannot_go_on_in_the_middle_of_a_run_is_a_failure_in_a_line(
    runner: FakeRunner, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is the user's to mend, but a run that has begun is not refused any more."""
    runner.begins, runner.error = True, UserError("logger.mode=online lost its server; use logger.mode=offline")
    assert main([]) == 1
    assert capsys.readouterr().err == "failed: logger.mode=online lost its server; use logger.mode=offline\n"
    assert summaries(empty_folder)


def test_check_that_breaks_is_a_failure(
    runner: FakeRunner, empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(chosen: object) -> str | None:
        raise ValueError("too many values to unpack")

    monkeypatch.setattr("spec_lab.menu.refusals.run.CHECKS", (broken,))
    assert main([]) == 1
    assert main(["--dry-run"]) == 1
    assert "refused:" not in capsys.readouterr().err


def test_failure_without_a_message_says_where(runner: FakeRunner, empty_folder: Path) -> None:
    runner.begins, runner.error = False, AssertionError()
    assert main([]) == 1
    [summary] = summaries(empty_folder).values()
    assert summary["reason"].startswith("AssertionError at fake_runner.py:")


def test_killed_run_leaves_a_record_that_says_so(runner: FakeRunner, empty_folder: Path) -> None:
    runner.begins, runner.error = False, KeyboardInterrupt()
    assert main([]) == 130
    [summary] = summaries(empty_folder).values()
    assert (summary["status"], summary["reason"]) == ("interrupted", "KeyboardInterrupt")
    assert summary["config"]["drafter"]["name"] == "eagle3"


def test_record_is_valid_before_the_models_are_loaded(runner: FakeRunner, empty_folder: Path) -> None:
    seen: list[str] = []

    def run(config: RunConfig, choices: dict[str, str], folder: Path) -> dict[str, Any]:
        seen.append(json.loads((folder / SUMMARY_FILE).read_text())["status"])
        return {}

    sys.modules["spec_lab.measure.runner"].run = run  # type: ignore[attr-defined]
    main([])
    assert seen == ["interrupted"]


def test_sweep_records_a_refused_job_and_goes_on(
    runner: FakeRunner, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-m", "drafter=none,ngram,random", "drafter.num_draft_tokens=3", "logger=wandb"]) == 2
    captured = capsys.readouterr()
    [line] = captured.err.splitlines()
    assert "drafter=none" in line
    sweep = empty_folder / last_line(captured.out)
    assert sweep.parent == empty_folder / "outputs"
    assert {folder.parent for _, _, folder in runner.calls} == {sweep}
    assert {getattr(config.logger, "group", None) for config, _, _ in runner.calls} == {sweep.name}
    assert "3 jobs: 1 refused, 2 finished" in captured.out
    found = summaries(sweep)
    assert sorted(summary["status"] for summary in found.values()) == ["finished", "finished", "refused"]
    [refused] = [summary for summary in found.values() if summary["status"] == "refused"]
    assert refused["choices"]["drafter"] == "none"
    assert refused["reason"] in line


def test_a_cell_that_is_left_out_of_a_sweep_is_not_run(
    runner: FakeRunner, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = "drafter=ngram drafter.num_draft_tokens=5"
    left_out = f"leave_out=['{cell}', 'drafter=oracle']"
    assert main(["drafter=ngram,random", "drafter.num_draft_tokens=3,5", left_out, "-m"]) == 0
    ran = [(choices["drafter"], config.drafter.num_draft_tokens) for config, choices, _ in runner.calls]
    assert ran == [("ngram", 3), ("random", 3), ("random", 5)]
    out, err = capsys.readouterr()
    assert f"left out: {cell} (leave_out=[] runs it)" in out
    assert "3 jobs: 3 finished" in out
    assert "leave_out: no job of the sweep is 'drafter=oracle'" in err and "drafter=ngram" not in err


def test_a_cell_left_out_that_cannot_be_is_refused(
    runner: FakeRunner, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-m", "seed=1,2", "leave_out=['drafter=ngran']"]) == 2
    assert "refused: leave_out, 'drafter=ngran': drafter=ngran: drafter has no option ngran" in capsys.readouterr().err
    assert runner.calls == []
    assert main(["leave_out=['drafter=eagle3']"]) == 0, "a run of its own is no cell"
    assert main(["-m", "seed=1,2", "leave_out=['seed=1', 'seed=2']"]) == 2
    assert "leave_out leaves out every job" in capsys.readouterr().err


def test_fresh_repeats_a_finished_sweep_once_and_goes_on_with_a_killed_one(
    runner: FakeRunner, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once it has finished it is shown, and runs nothing."""
    command = ["-m", "drafter=ngram", "seed=1,2"]
    assert main(command) == 0
    ended = capsys.readouterr().out
    assert f"more: python -m spec_lab.report {last_line(ended)}" in ended, "its table is shown as it ends"
    assert "all runs had already ended" not in ended
    runner.errors = {2: KeyboardInterrupt()}
    assert main([*command, "fresh=true"]) == 130
    runner.errors = {}
    assert main([*command, "fresh=true"]) == 0
    assert [config.seed for config, _, _ in runner.calls] == [1, 2, 1, 2, 2]
    capsys.readouterr()
    assert main(["-m", "seed=1,2", "drafter=ngram"]) == 0
    assert len(runner.calls) == 5
    first, second = sorted(path.name for path in (empty_folder / "outputs").iterdir())
    assert second == f"{first}-2"
    out = capsys.readouterr().out
    assert last_line(out).endswith(second), "the newest is shown"
    assert out.count(last_line(out)) == 2 + 3 + 2, "runs before, the table with an interrupted one, more, the last line"
    assert "fresh=true runs everything again" in out
    once, again = ({run.name for run in (empty_folder / "outputs" / sweep).glob("run-*")} for sweep in (first, second))
    assert once <= again, "fresh is no part of a run"


def test_an_ended_sweep_that_runs_its_failed_job_again_has_not_ended(runner: FakeRunner, empty_folder: Path) -> None:
    runner.errors = {2: RuntimeError("out of luck")}
    assert main(["-m", "seed=1,2"]) == 1
    [sweep] = (empty_folder / "outputs").iterdir()
    assert (sweep / "sweep.json").exists() and not was_left(sweep)
    runner.errors = {2: KeyboardInterrupt()}
    assert main(["-m", "seed=1,2"]) == 130
    assert was_left(sweep), "it was interrupted, and no longer says how it ended"
    runner.errors = {}
    assert main(["-m", "seed=1,2"]) == 0
    assert json.loads((sweep / "sweep.json").read_text()) == {"jobs": 2, "finished": 2}


def test_a_killed_sweep_goes_on_where_it_was(
    runner: FakeRunner, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed behind refused jobs and a failed one: these two run again, those that ended do not."""
    command = ["-m", "drafter=none,ngram", "drafter.num_draft_tokens=3", "seed=1,2"]
    runner.errors = {1: RuntimeError("out of luck"), 2: KeyboardInterrupt()}
    assert main(command) == 130
    assert [config.seed for config, _, _ in runner.calls] == [1, 2]
    runner.errors = {1: RuntimeError("out of luck")}
    assert main(command) == 1, "one has failed"
    runner.errors = {}
    assert main(command) == 2
    assert [config.seed for config, _, _ in runner.calls] == [1, 2, 1, 2, 1]
    [sweep] = {folder.parent for _, _, folder in runner.calls}
    assert "4 jobs: 2 refused, 2 finished" in capsys.readouterr().out
    assert json.loads((sweep / "sweep.json").read_text()) == {"jobs": 4, "refused": 2, "finished": 2}


@pytest.mark.parametrize("argument", ["--dry-run", "dry_run=true"])
def test_dry_run_prints_the_parts_and_writes_nothing(
    argument: str, runner: FakeRunner, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drafter=ngram", "prune=catchup", argument]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "max_ngram=4" in lines["drafter"]
    assert "catchup=pre_attention" in lines["prune"]
    assert "batch_size=1" in lines["run"]
    assert lines["nothing"] == "nothing is refused before the target's files are read"
    assert not list(empty_folder.iterdir())
    assert not runner.calls


def test_dry_run_lists_every_refusal(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "repeats=0", "name=.."]) == 2
    refused = [line for line in capsys.readouterr().out.splitlines() if line.startswith("refused: ")]
    assert len(refused) == 2


def test_dry_run_of_a_sweep_leaves_no_record(runner: FakeRunner, empty_folder: Path) -> None:
    assert main(["-m", "--dry-run", "seed=1,2"]) == 0
    assert not [path for path in empty_folder.rglob("*") if path.is_file()]
    assert not runner.calls


def test_help_needs_no_hydra(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drafter=ngram", "--help"]) == 0
    assert capsys.readouterr().out.count("python -m spec_lab ") >= 2


def test_help_says_that_it_reads_no_folder_of_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config-dir", str(tmp_path), "--help", "drafter"]) == 2
    assert "--help does not read --config-dir; leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("program", [main])
def test_the_version_is_that_of_the_lab(
    program: Callable[[list[str]], int], empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"spec_lab {__version__} (Hydra ")


def test_hydras_own_flags_work(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cfg", "job", "--package", "drafter", "drafter=ngram"]) == 0
    assert "max_ngram: 4" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [["--package", "drafter"], ["-p", "x"]])
@pytest.mark.parametrize("program", [main])
def test_a_flag_that_only_printing_reads_is_refused_elsewhere(
    program: Callable[[list[str]], int], flags: list[str], empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program(flags) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert flags[0] in line and "--cfg job" in line
    assert program([flags[0], "drafter", "--cfg", "job"]) == 0


def test_arguments_of_the_process_are_restored(runner: FakeRunner, empty_folder: Path) -> None:
    before = list(sys.argv)
    main(["batchsize=3"])
    main(["seed=3"])
    assert sys.argv == before


def test_help_composing_and_refusing_never_import_torch(empty_folder: Path) -> None:
    code = """if True:
        import sys, spec_lab, spec_lab.extend; from spec_lab.__main__ import main
        for arguments in (["--help"], ["--dry-run"], ["-m", "batch_size=0"]):
            main(arguments)
        spec_lab.compose(["device=cuda"])
        print([name for name in ("torch", "transformers", "wandb", "pandas") if name in sys.modules])"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert last_line(done.stdout) == "[]"


def test_module_exits_with_the_code_of_main(empty_folder: Path) -> None:
    command = [sys.executable, "-m", "spec_lab", "batchsize=3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "refused: batchsize=3: there is no key batchsize; did you mean batch_size?\n"
