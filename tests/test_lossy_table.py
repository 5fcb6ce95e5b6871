"""The prices of lossy rules: gain and distance beside the lossless run, and the order of the lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from spec_lab.core.results import GenerationResult, GraphCounts
from spec_lab.record.recorder import Recorder, request_row
from spec_lab.record.runs import find_runs
from spec_lab.record.summary import Measured, build_summary
from spec_lab.report.lossy_table import format_prices, read_prices
from tests.fake_runs import make_info, make_request, make_round

NUM_REQUESTS = 12


def record(folder: Path, acceptance: dict[str, object], accepted: Sequence[int], apart: float, wrong: int = 0) -> None:
    """A run whose rounds all emit tokens `apart` from the target; None of them where that is 0, as of a lossless rule.

    Of each second request the last round accepts a draft less, so that prompts differ.
    """
    config = {"acceptance": acceptance, "drafter": {"name": "eagle3", "num_draft_tokens": 3}}
    lists = [[*accepted[:-1], accepted[-1] - index % 2] for index in range(NUM_REQUESTS)]
    requests = [make_request(f"r{index}", accepted) for index, accepted in enumerate(lists)]
    rounds = [make_round([row[place] + 1 for row in lists], 0.01) for place in range(len(accepted))]
    for part in rounds if apart else []:
        part.distance = [[apart * (count + 1), 2 * apart * (count + 1)] for count in part.accepted]
    result = GenerationResult(requests, rounds, [], GraphCounts(), 3, 1.0)
    correct: dict[str, bool | None] = {f"r{index}": index >= wrong for index in range(NUM_REQUESTS)}
    info = make_info(config)
    summary = build_summary(info, Measured([result], correct, None), seconds=1.0, acceptance_lossless=not apart)
    with Recorder(folder, info) as recorder:
        for request in requests:
            recorder.request(request_row(request, "text", correct[request.request_id], None, None))
        recorder.finish(summary)


def test_rules_stand_by_gain_for_distance_behind_the_lossless_ones(tmp_path: Path) -> None:
    record(tmp_path / "0", {"name": "rejection", "method": "standard"}, [1, 1, 2], apart=0.0)
    record(tmp_path / "1", {"name": "fly", "window": 1}, [3, 3, 3], apart=0.08, wrong=9)
    record(tmp_path / "2", {"name": "cascade", "alpha": 0.3}, [1, 2, 3], apart=0.01)
    record(tmp_path / "3", {"name": "threshold", "acc": 0.9}, [0, 1, 1], apart=0.001)
    [priced] = read_prices(find_runs([tmp_path]))
    assert [price.rule for price in priced.prices] == [
        "rejection, method standard",
        "cascade, alpha 0.3",
        "fly, window 1",
        "threshold, acc 0.9",
    ]
    base, cascade, fly, threshold = priced.prices
    assert base.distance is None and base.change is None
    assert cascade.gain is not None and cascade.gain.value == pytest.approx(2 / 3)
    assert cascade.gain_per_distance == pytest.approx(2 / 3 / 1.0) and cascade.gain_per_point is None
    assert fly.gain_per_distance == pytest.approx(5 / 3 / 8) and fly.gain_per_point == pytest.approx(5 / 3 / 75)
    assert threshold.gain_per_distance is None, "it lost length"
    text = format_prices(priced)
    assert "0.0100" in text and "-75.0" in text


def test_without_a_lossless_run_nothing_is_priced(tmp_path: Path) -> None:
    record(tmp_path / "1", {"name": "fly", "window": 1}, [3, 3, 3], apart=0.08)
    assert read_prices(find_runs([tmp_path])) == []
