"""Which weights of a training are kept as the best, with made-up lengths."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from spec_lab.train import truth
from spec_lab.train.truth import Truth


def look_at(folder: Path, lengths: Mapping[int, float], monkeypatch: pytest.MonkeyPatch) -> Truth:
    """Begin or resume a training, and look at it after each step of `lengths`. Its weights are the step's number."""

    def decoded(*_: object) -> dict[str, Any]:
        return {"acceptance_length": lengths.get(now), "interval": None, "conditional_rates": []}

    def export(to: Path) -> None:
        to.mkdir()
        (to / "weights").write_text(str(now))

    def forced() -> dict[str, Any]:
        return {"acceptance_length": 1.0, "conditional_rates": []}

    now = 0
    monkeypatch.setattr(truth, "decoded", decoded)
    serving: Any = None
    watch = Truth("eagle3", serving, [], export, forced, folder, lambda step, figures: None)
    watch.begin(folder)
    for now in lengths:
        watch.look(now)
    return watch


def test_the_recorded_step_is_that_of_the_weights_also_after_a_resumption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resumed training starts at step 4, rounds otherwise, and ends earlier."""
    folder = tmp_path / "best"
    assert look_at(folder, {4: 2.0, 8: 1.9, 12: 2.5}, monkeypatch).report()["best_step"] == 12
    report = look_at(folder, {8: 1.8, 10: 1.9}, monkeypatch).report()
    assert [point["step"] for point in report["points"]] == [4, 8, 10]
    assert (folder / "weights").read_text() == str(report["best_step"]) == "10"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["best"]
