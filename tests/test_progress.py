"""A run, a load and a sweep say that they go on, in a pipe as well, whatever the main thread is busy with."""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from spec_lab.__main__ import main
from spec_lab.record.progress import Progress, said_to_go_on
from tests.fake_runner import FakeRunner

BEAT = 0.05


def wait_for(stream: io.StringIO, count: int) -> None:
    """Block the main thread, as one long operation does, until there are so many lines."""
    deadline = time.monotonic() + 20
    while stream.getvalue().count("\n") < count and time.monotonic() < deadline:
        time.sleep(BEAT)


def test_a_stage_that_takes_long_is_said_to_go_on() -> None:
    stream = io.StringIO()
    with Progress(3, "request", stream, seconds=BEAT) as progress:
        progress.stage("plain")
        progress.advance()
        wait_for(stream, 3)
    lines = stream.getvalue().splitlines()
    assert len(lines) >= 3 and lines[0].endswith("0/3 requests: plain")
    assert all(line.endswith("1/3 requests: plain, goes on") for line in lines[1:])
    assert not _beats()
    time.sleep(2 * BEAT)
    assert stream.getvalue().splitlines() == lines, "nothing is said behind its end"


def test_nothing_is_said_without_a_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that was started without one."""
    monkeypatch.setattr("sys.stderr", None)
    with Progress(3, "request", seconds=BEAT) as progress:
        progress.stage("plain")
        progress.advance()
        time.sleep(2 * BEAT)


def test_items_of_a_stage_are_counted_while_it_goes_on() -> None:
    stream = io.StringIO()
    with Progress(3, "request", stream, seconds=BEAT) as progress:
        for item in progress.counted("comparing", "abc"):
            if item == "b":
                wait_for(stream, 3)
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("0/3 requests: comparing")
    assert lines[-1].endswith("comparing, 1 of 3, goes on"), "what is being looked at is not done"


def _beats() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "_run" in thread.name]


def test_an_error_ends_it_too() -> None:
    stream = io.StringIO()
    with pytest.raises(KeyboardInterrupt), Progress(3, "request", stream, seconds=60):
        raise KeyboardInterrupt
    assert not _beats()


def test_what_is_short_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with said_to_go_on("loading"):
        pass
    assert capsys.readouterr().err == ""
    with said_to_go_on("loading", BEAT):
        time.sleep(6 * BEAT)
    assert "s] loading\n" in capsys.readouterr().err
