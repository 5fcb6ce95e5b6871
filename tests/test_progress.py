"""What a run says while it runs, in a pipe."""

from __future__ import annotations

import io

import pytest

from spec_lab.record import progress
from spec_lab.record.progress import Progress


def test_a_stage_has_a_line_and_steps_have_one_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = [0.0], io.StringIO()
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    with Progress(9, "request", stream) as shown:
        shown.stage("plain")
        for seconds in (3.0, 11.0, 12.0, 24.0):
            clock[0] = seconds
            shown.advance()
        for item in shown.counted("comparing", "ab"):
            clock[0] += 20 * (item == "a")
    assert stream.getvalue().splitlines() == [
        "[  0.0 s] 0/9 requests: plain",
        "[ 11.0 s] 2/9 requests: plain",
        "[ 24.0 s] 4/9 requests: plain",
        "[ 24.0 s] 4/9 requests: comparing",
        "[ 44.0 s] 4/9 requests: comparing, 1 of 2",
    ]
