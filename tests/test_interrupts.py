"""Ctrl-C ends a run as interrupted, and a sweep with it, wherever it strikes."""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.autograd.profiler import profile

from spec_lab.__main__ import main
from spec_lab.core.types import Request
from spec_lab.engine.engine import Engine
from spec_lab.measure.runner import run
from spec_lab.measure.watched_rounds import WatchedRounds, watch_rounds
from spec_lab.menu.chosen import choose
from spec_lab.program.ending import leave
from spec_lab.program.interrupts import Interrupts
from spec_lab.record.progress import Progress
from spec_lab.record.reading import read_request_rows, read_summary
from spec_lab.record.sinks import SUMMARY_FILE
from spec_lab.record.trace import TRACE_FILE
from tests.fake_runner import FakeRunner, summaries
from tests.fake_runs import CHOICES
from tests.tiny_runs import make_run_config, make_runnable_pair, write_prompts

PROMPTS = [{"id": str(index), "category": "plain", "prompt": "abc", "form": "continue"} for index in range(2)]


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def let_it_through() -> None:
    press_ctrl_c()


def end_it() -> None:
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "or it would end these tests"
    signal.raise_signal(signal.SIGTERM)


def fail_in_its_place() -> None:
    try:
        press_ctrl_c()
    finally:
        raise AssertionError("Profiler must be initialized before stopping trace")


def drop_it() -> None:
    with suppress(BaseException):
        press_ctrl_c()


def drop_it_in_a_finaliser() -> None:
    class Finalised:
        def __del__(self) -> None:
            press_ctrl_c()

    Finalised()
    time.sleep(5)  # the run goes on, but not for long


@pytest.mark.parametrize(
    "strike",
    [
        let_it_through,
        end_it,
        drop_it_in_a_finaliser,
        fail_in_its_place,
        drop_it,
    ],
)
def test_ctrl_c_ends_the_run_and_the_sweep(
    strike: Callable[[], None],
    runner: FakeRunner,
    empty_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_run = runner.run

    def struck(*arguments: Any) -> dict[str, Any]:
        strike()
        return fake_run(*arguments)

    monkeypatch.setattr(sys.modules["spec_lab.measure.runner"], "run", struck)
    signals = (signal.SIGINT, signal.SIGTERM)
    handlers = [*map(signal.getsignal, signals)]
    commands = ([], ["-m", "seed=1,2"]) if strike is let_it_through else (["-m", "seed=1,2"],)
    for arguments in commands:
        assert main(arguments) == 130
        assert capsys.readouterr().err == "interrupted\n"
    assert [*map(signal.getsignal, signals)] == handlers
    found = summaries(empty_folder)
    assert len(found) == len(commands), "the run, and the first of the sweep"
    was_dropped = strike is drop_it
    assert {summary["status"] for summary in found.values()} == {"finished" if was_dropped else "interrupted"}


def test_ctrl_c_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            press_ctrl_c()
        assert not interrupts.seen
    finally:
        signal.signal(signal.SIGINT, before)


class Unstoppable(WatchedRounds):
    """Ctrl-C strikes while it starts, so that there is nothing to stop."""

    def span(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def _start(self) -> None:
        raise KeyboardInterrupt

    def _stop(self) -> None:
        raise AssertionError("Profiler must be initialized before stopping trace")


def engine_that_enters_rounds(num_rounds: int) -> Engine:
    parts = SimpleNamespace(timer="the timer")

    def generate(*_: Any, **__: Any) -> None:
        for _ in range(num_rounds):
            with parts.timer.round():
                pass

    prompt_pass = SimpleNamespace(chunk_size=8)
    graph = SimpleNamespace(rounds_per_replay=1)
    engine = SimpleNamespace(parts=parts, generate=generate, prompt_pass=prompt_pass, num_draft_tokens=1, graph=graph)
    return cast(Engine, engine)


def test_ctrl_c_in_the_middle_of_a_start_is_what_is_raised() -> None:
    engine = engine_that_enters_rounds(5)
    with pytest.raises(KeyboardInterrupt):
        watch_rounds(engine, [Request("a", "b", (1, 2), max_new_tokens=4)], 2, Unstoppable)
    assert engine.parts.timer == "the timer"  # type: ignore[comparison-overlap]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_runnable_pair(tmp_path_factory.mktemp("pair"))


def raise_interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("owner", "method"),
    [(profile, "__enter__"), (profile, "__exit__"), (profile, "key_averages")],
)
def test_ctrl_c_at_any_moment_of_profiling_leaves_an_interrupted_record(
    owner: Any, method: str, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)
    config = make_run_config(pair, prompts, references=[], profile_rounds=2, max_new_tokens=6)
    monkeypatch.setattr(owner, method, raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(choose(config), CHOICES, tmp_path / "run")
    summary = json.loads((tmp_path / "run" / SUMMARY_FILE).read_text())
    assert (summary["status"], summary["reason"]) == ("interrupted", "KeyboardInterrupt")


CTRL_C = KeyboardInterrupt()


@pytest.mark.parametrize("error", [CTRL_C, OSError("full")])
def test_a_trace_that_cannot_be_finished_is_not_left_behind(
    error: BaseException, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(self: profile, path: str) -> None:
        Path(path).write_bytes(b"half of it")
        raise error

    monkeypatch.setattr(profile, "export_chrome_trace", export)
    prompts = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)
    config = make_run_config(pair, prompts, references=[], profile_rounds=2, max_new_tokens=6)
    with pytest.raises(type(error)):
        run(choose(config), CHOICES, tmp_path / "run")
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.endswith(TRACE_FILE)]
    assert read_summary(tmp_path / "run")["status"] == ("interrupted" if error is CTRL_C else "failed")


@pytest.mark.parametrize(("where", "num_kept"), [("advance", 2), ("counted", 3)])
def test_ctrl_c_in_the_first_repeat_leaves_the_requests_that_had_finished(
    where: str, num_kept: int, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While they are decoded, and while the outputs of all of them are checked."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", [*PROMPTS, PROMPTS[0] | {"id": "2", "answer": "7"}])
    config = make_run_config(pair, prompts, references=["plain"], max_new_tokens=6)
    method, num_left = getattr(Progress, where), [2]

    def press_at_the_second(progress: Progress, *parts: Any) -> Any:
        num_left[0] -= 1
        if num_left[0] == 0:
            raise KeyboardInterrupt
        return method(progress, *parts)

    run(choose(config), CHOICES, tmp_path / "whole")
    monkeypatch.setattr(Progress, where, press_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        run(choose(config), CHOICES, tmp_path / "run")
    summary = read_summary(tmp_path / "run")
    assert summary["status"] == "interrupted" and f"{num_kept} requests were decoded" in str(summary["reason"])
    untimed = [
        [{key: value for key, value in row.items() if not key.endswith("_at")} for row in read_request_rows(folder)]
        for folder in (tmp_path / "run", tmp_path / "whole")
    ]
    assert untimed[0] == untimed[1][:num_kept], "as they stand after a whole run"


def test_ctrl_c_ends_the_process_at_once(empty_folder: Path) -> None:
    """In plain decoding's first repeat, with all that a run imports in memory; five seconds are for a busy machine."""
    command = [sys.executable, "-m", "spec_lab", "workload.limit=2", "max_new_tokens=8", "references=[plain]"]
    command += ["warmup_requests=0", "kernels=torch"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "plain, repeat 1" in line:
            break
    process.send_signal(signal.SIGINT)
    pressed = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - pressed < 5
    assert (process.returncode, errors.splitlines()[-1]) == (130, "interrupted")
    [folder] = [path.parent for path in empty_folder.rglob("summary.json")]
    assert read_summary(folder)["status"] == "interrupted"
    assert len(read_request_rows(folder)) == 2


def test_after_ctrl_c_the_interpreter_is_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(logging, "disable", lambda: done.append("no logs"))  # it would outlast this test
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: done.append("exit functions"))
    monkeypatch.setattr(os, "_exit", done.append)
    with pytest.raises(SystemExit):  # where the process would have ended
        leave(130)
    assert done == ["no logs", "exit functions", 130]


@pytest.mark.parametrize("code", [0, 2])
def test_other_endings_take_the_interpreter_apart(code: int) -> None:
    with pytest.raises(SystemExit) as ended:
        leave(code)
    assert ended.value.code == code


def test_a_real_ctrl_c_in_the_profiler_ends_a_sweep(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start = profile.__enter__

    def press_soon(self: profile) -> None:
        start(self)
        Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()

    monkeypatch.setattr(profile, "__enter__", press_soon)
    typed = ["-m", "debug=smoke", "seed=1,2,3", "profile_rounds=16", "references=[]", "kernels=torch"]
    assert main(typed) == 130
    errors = capsys.readouterr().err
    assert errors.splitlines()[-1] == "interrupted" and "Traceback" not in errors
    [summary] = summaries(empty_folder).values()
    assert summary["status"] in ("interrupted", "finished")
