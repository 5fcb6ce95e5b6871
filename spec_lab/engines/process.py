"""The lab's side of an engine's process: starts it, asks it in JSON lines, and says in one line how it failed."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from spec_lab.core.errors import Breakdown, UserError
from spec_lab.engines.plan import Knobs

WORKER = Path(__file__).with_name("worker.py")
PATIENCE = 10.0
"""Seconds that an engine has to end by itself when it is closed."""


class EngineProcess:
    """One engine with one configuration. Its own output goes to a log file.

    Raises:
        UserError: the Python does not start, or lacks the engine, or the engine refuses its settings when it loads.
    """

    def __init__(self, knobs: Knobs, python: str | None, settings: Mapping[str, Any], log: Path) -> None:
        self._knobs, self._log, self._timeout = knobs, log, float(settings["timeout"])
        self._python = python or sys.executable
        self._lines: queue.Queue[str | None] = queue.Queue()
        command = [self._python, str(WORKER), knobs.engine]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        try:
            with log.open("a", encoding="utf-8") as errors:
                self._process = subprocess.Popen(command, stderr=errors, start_new_session=True, **pipes)
        except OSError as error:
            raise UserError(
                f"engine.python={python} does not start ({error.strerror}); give the Python of an environment with "
                f"{knobs.package or 'the standard library'}"
            ) from error
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.version: str | None = self._ask("load", dict(settings), while_="loading")["version"]
        except BaseException as error:
            self.close()
            if isinstance(error, Breakdown):
                raise UserError(str(error)) from error
            raise

    def generate(self, requests: Sequence[Mapping[str, Any]], say: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Run one pass, call `say` with each answer when it is complete, and return what the engine tells at its end.

        Raises:
            Breakdown: the engine failed, ended, or is silent.
        """
        return self._ask("generate", {"requests": list(requests)}, while_="decoding", say=say)

    def close(self) -> None:
        """End the process and those that it started."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # at the end of its input it leaves
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _ask(
        self,
        word: str,
        value: Mapping[str, Any],
        while_: str,
        say: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({word: value}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._ended(while_)
        while True:
            try:
                line = self._lines.get(timeout=self._timeout)
            except queue.Empty:
                raise Breakdown(
                    f"engine={self._knobs.engine} said nothing for {self._timeout:g} seconds while {while_}; raise "
                    f"engine.timeout, or see {self._log}"
                ) from None
            if line is None:
                self._ended(while_)
            ((kind, found),) = json.loads(line).items()
            if kind == "failed":
                self._failed(found, while_)
            if kind != "answer":
                return dict(found)
            assert say is not None, "no pass was asked for"
            say(found)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _failed(self, found: Mapping[str, Any], while_: str) -> NoReturn:
        knobs = self._knobs
        if found["missing"] is not None and found["missing"].partition(".")[0] == knobs.package:
            raise UserError(f"engine={knobs.engine}: {self._python} has no {knobs.package}; {knobs.install}")
        raise Breakdown(
            f"engine={knobs.engine} failed while {while_}: {found['kind']}: {found['text']}; its log is {self._log}"
        )

    def _ended(self, while_: str) -> NoReturn:
        code = self._process.wait()
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = f": {lines[-1][:200]}" if lines else ""
        raise Breakdown(
            f"the process of engine={self._knobs.engine} ended with code {code} while {while_}{last}; its log is "
            f"{self._log}"
        )
