"""What a prompt pass is said to take in memory holds nothing of the engine before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from spec_lab.engine.engine import Engine
from tests.bench_modules import imported


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with imported("prompt_outputs", monkeypatch) as module:
        yield module


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Python collects nothing by itself meanwhile."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
def test_caches_of_the_engine_before_are_gone_when_a_pass_is_counted(
    outputs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches: dict[int, weakref.ref[Any]] = {}
    alive: list[int] = []
    plain_generate = Engine.generate

    def generate(engine: Engine, *arguments: Any) -> Any:
        caches[id(engine.parts.cache)] = weakref.ref(engine.parts.cache)
        alive.append(sum(cache() is not None for cache in caches.values()))
        return plain_generate(engine, *arguments)

    monkeypatch.setattr(Engine, "generate", generate)
    monkeypatch.setattr(outputs, "NUM_REPEATS", 1)
    options = ["--tokens=5", "--chunks=8", "--drafters=none,eagle3", "device=cpu"]
    assert outputs.main([str(tmp_path / "out"), *options]) == 0
    # The first of the five passes warms up.
    assert alive == [1] * 5
