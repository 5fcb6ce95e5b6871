"""What each case costs, and by that its tier: over SLOW seconds of CPU time in tests/costs.json it is `slow`.

`make costs` writes the file. CPU time of the process and of those it waited for does not depend on who else uses the
machine, as wall time does. A case that the file does not name runs by default.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

PATH = Path(__file__).with_name("costs.json")
SLOW = 0.25
"""Cases that cost no more are not written down, so that the file is short and changes seldom."""


def read_costs() -> dict[str, float]:
    """Seconds by node id; the file has them by file and name."""
    files: dict[str, dict[str, float]] = json.loads(PATH.read_text()) if PATH.exists() else {}
    return {f"{file}::{name}": seconds for file, cases in files.items() for name, seconds in cases.items()}


def kept_or_new(old: float, new: float) -> float:
    """A figure is replaced where it is off by a third, or on the other side of SLOW: others are noise."""
    is_close = abs(new - old) <= max(old, new) / 3 and (old > SLOW) == (new > SLOW)
    return old if is_close else round(new, 2)


def write_costs(measured: dict[str, float]) -> None:
    old = read_costs()
    files: dict[str, dict[str, float]] = {}
    for case in sorted(measured):
        if measured[case] > SLOW:
            file, name = case.split("::", 1)
            files.setdefault(file, {})[name] = kept_or_new(old.get(case, 0.0), measured[case])
    PATH.write_text(json.dumps(files, indent=1) + "\n")


def mark_slow(items: list[pytest.Item]) -> None:
    costs = read_costs()
    for item in items:
        if costs.get(item.nodeid, 0.0) > SLOW:
            item.add_marker(pytest.mark.slow)


def choose_named(config: pytest.Config) -> None:
    """Run what is asked for by node id whatever its tier, unless the command chooses with -m itself."""
    words = [str(word) for word in config.invocation_params.args]
    is_worker = hasattr(config, "workerinput")  # of xdist: it is handed what the first process has made of the command
    if not is_worker and not any(word.startswith("-m") for word in words) and any("::" in word for word in words):
        config.option.markexpr = ""


def cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class CostRecorder:
    """Measures each case that passes, in whichever process it runs, and writes the file at the end of the first one."""

    def __init__(self, config: pytest.Config) -> None:
        self._is_worker = hasattr(config, "workerinput")
        self._begin = 0.0
        self._measured: dict[str, float] = {}

    def pytest_runtest_logstart(self) -> None:
        self._begin = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        report = yield
        if call.when == "teardown":
            report.user_properties.append(("cpu_seconds", cpu_seconds() - self._begin))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self._measured[report.nodeid] = dict(report.user_properties)["cpu_seconds"]

    def pytest_sessionfinish(self) -> None:
        if not self._is_worker:
            write_costs(self._measured)
