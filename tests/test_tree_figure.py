"""The picture of docs/trees.md is drawn from the page's own tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.bench_modules import imported

ROOT = Path(__file__).parents[1]
PAGE = """
| | rows N | drafts | acceptance length | tokens/s over plain |
| --- | --- | --- | --- | --- |
| frozen_kv | 4 | chain K=3 | 2.41 | 1.26 |
| | 16 | dynamic, depth 5 | 3.54 | 1.23* |
| eagle3 | 16 | dynamic, depth 3 | 2.91 | **1.74** |

A line between.

| | drafts | batch 1 | 16* |
| --- | --- | --- | --- |
| frozen_kv | chain K=3 | 1.70* | - |
| eagle3 | dynamic, depth 3, 16 rows | **1.74** | 1.32 |
"""


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with imported("tree_figure", monkeypatch) as module:
        yield module


@pytest.mark.slow
def test_cells_have_their_drafter_shape_and_star(figure: ModuleType) -> None:
    rows = figure.by_rows(figure.find_table(PAGE, figure.BY_ROWS)).to_numpy().tolist()
    assert rows == [
        ["frozen_kv", "chain", 4, 2.41, 1.26, False],
        ["frozen_kv", "depth 5", 16, 3.54, 1.23, True],
        ["eagle3", "depth 3", 16, 2.91, 1.74, False],
    ]
    batches = figure.by_batch(figure.find_table(PAGE, figure.BY_BATCH)).to_numpy().tolist()
    assert batches == [
        ["frozen_kv", "chain", 1, 1.70, True],
        ["eagle3", "depth 3", 1, 1.74, False],
        ["eagle3", "depth 3", 16, 1.32, True],
    ]


@pytest.mark.slow
def test_the_page_can_be_drawn(figure: ModuleType, tmp_path: Path) -> None:
    assert figure.main([str(ROOT / "docs" / "trees.md"), str(tmp_path / "picture.png")]) == 0
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
