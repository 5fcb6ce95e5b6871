"""Imports a script of `benchmarks/`, which finds its neighbours as if it had been started there."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@contextmanager
def imported(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Give the module, and forget it and its neighbours afterwards."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module(name)
    for script in BENCHMARKS.glob("*.py"):
        sys.modules.pop(script.stem, None)
