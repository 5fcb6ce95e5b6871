"""The picture of docs/log/trees.md is drawn from the page's own table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.bench_modules import imported

PAGE = """
| drafts | acceptance length | batch 1 |
| --- | --- | --- |
| chain K=3 | 1.19 | 1.02 |

A line between.

| | rows N | drafts | acceptance length | batch 1 | 16 |
| --- | --- | --- | --- | --- | --- |
| frozen_kv | 4 | chain K=3 | 2.41 | 1.26 | .93* |
| | 16 | dynamic, depth 5 | 3.54 | - | **1.23*** |
| eagle3 | 16 | dynamic, depth 3 | 2.91 | **1.74** | 1.32 |
"""


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with imported("tree_figure", monkeypatch) as module:
        yield module


def test_cells_have_their_drafter_shape_batch_and_star(figure: ModuleType) -> None:
    assert figure.read(figure.find_table(PAGE, figure.HEADER)).to_numpy().tolist() == [
        ["frozen_kv", "chain", 4, 1, 1.26, False],
        ["frozen_kv", "chain", 4, 16, 0.93, True],
        ["frozen_kv", "depth 5", 16, 16, 1.23, True],
        ["eagle3", "depth 3", 16, 1, 1.74, False],
        ["eagle3", "depth 3", 16, 16, 1.32, False],
    ]


def test_the_page_can_be_drawn(figure: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    assert figure.main([str(tmp_path / "page.md"), str(tmp_path / "picture.png")]) == 0
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
