"""The process of an engine: `PYTHON worker.py NAME`, which imports that engine and talks JSON lines over its pipes.

It is told `{"load": SETTINGS}`, then `{"generate": PASS}` any number of times. It says `{"ready": {"version": ...}}`,
an `{"answer": ...}` for each request when it ends, and `{"done": {"seconds": ...}}`; or `{"failed": {...}}`. What the
engine prints goes to stderr.

This file runs in the engine's environment, without the lab.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import traceback
import types
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGE = "spec_lab_engines"
"""The name of this folder as a package here. As `sys.path[0]` its files would hide engines of the same names."""


class Channel:
    """Writes JSON lines to the lab, from any thread."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self._lock = threading.Lock()
        os.dup2(2, 1)

    def say(self, kind: str, value: Any) -> None:
        with self._lock:
            self._file.write(json.dumps({kind: value}) + "\n")
            self._file.flush()


def main() -> None:
    """Serve one engine until the lab closes the pipe."""
    channel = Channel()
    sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != HERE]
    package = types.ModuleType(PACKAGE)
    package.__path__ = [str(HERE)]
    sys.modules[PACKAGE] = package
    file: Any = importlib.import_module(f"{PACKAGE}.{sys.argv[1]}")
    engine: Any = None
    for line in sys.stdin:
        ((word, value),) = json.loads(line).items()
        try:
            if word == "load":
                engine = file.ENGINE(value)
                channel.say("ready", {"version": engine.version})
            else:
                channel.say("done", engine.generate(value, lambda answer: channel.say("answer", answer)))
        except Exception as error:
            traceback.print_exc()
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            channel.say("failed", {"kind": type(error).__name__, "text": str(error), "missing": missing})


if __name__ == "__main__":
    main()
