"""The table of rounds on an H200: its floors, and that a cell once measured is not measured again."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from spec_lab.app.compose import compose
from spec_lab.config.checks import problems
from tests.bench_modules import imported


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with imported("h200_round", monkeypatch) as module:
        yield module


def test_every_cell_composes(rounds: ModuleType) -> None:
    assert len({cell.name for cell in rounds.CELLS}) == len(rounds.CELLS)
    for cell in rounds.CELLS:
        config = compose([*cell.overrides(), "dtype=bfloat16"]).config
        assert list(problems(config)) == []
