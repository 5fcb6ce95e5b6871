"""Confidences in a paper's tables, from made-up records, and in the record of a run whose drafting ends by them."""

from __future__ import annotations

import pytest

from spec_lab.paper import runs
from spec_lab.paper.acceptance import position_table
from spec_lab.paper.figures import figures_of
from spec_lab.paper.plan import PlannedCell
from spec_lab.paper.provenance import COLUMNS, NONE
from spec_lab.paper.reliability import (
    JudgedDraft,
    bins_table,
    calibration_error,
    chance_of_order,
    judged_drafts,
    reliability_table,
)
from spec_lab.record.recorder import request_row
from spec_lab.record.row_schema import RequestRow
from tests.fake_runs import make_request, make_summary


def row_with(accepted: list[int], judged: list[int], *confidences: list[float]) -> RequestRow:
    record = make_request("r", accepted, judged, judged=judged, offered=[len(part) for part in confidences])
    record.confidence_per_round = list(confidences)
    return request_row(record, "", None, None)


def test_drafts_behind_the_end_of_a_text_are_left_out() -> None:
    """The last round accepts three drafts, of which the first ends the text; one round before it offered none."""
    row = row_with([1, 0, 3], [2, 1, 1], [0.6, 0.25], [], [0.9, 0.8, 0.7])
    assert list(judged_drafts([row, request_row(make_request("other", [2]), "", None, None)])) == [
        JudgedDraft(1, 0.6, True),
        JudgedDraft(2, 0.25, False),
        JudgedDraft(1, 0.9, True),
    ]


def test_error_and_order_of_made_up_confidences() -> None:
    """The bin from .9 has mean .95 and half accepted, that from .2 has .25 and all."""
    drafts = [JudgedDraft(1, 0.9, True), JudgedDraft(1, 1.0, False), JudgedDraft(2, 0.25, True)]
    assert calibration_error([0.9, 1.0, 0.25], [True, False, True]) == pytest.approx((2 * 0.45 + 0.75) / 3)
    assert chance_of_order(drafts) == 0.0
    tied = [JudgedDraft(1, 0.5, True), JudgedDraft(1, 0.5, False), JudgedDraft(1, 0.2, False)]
    assert chance_of_order(tied) == (0.5 + 1) / 2
    assert chance_of_order(drafts[:1]) is None


def test_tables_say_reliability_by_line_and_task_and_none_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "provenance_of", lambda _: dict.fromkeys(COLUMNS, NONE))

    def run(line: str, task: str, row: RequestRow) -> runs.PaperRun:
        return runs.PaperRun(PlannedCell("acceptance", line, task, 0.0, None, None, ()), make_summary(), [row])

    sure = run("sure", "code", row_with([1, 0], [2, 1], [0.61, 0.21], [1.0]))
    silent = run("silent", "code", request_row(make_request("x", [1, 0]), "", None, None))
    assert reliability_table([silent]).rows == [] == bins_table([silent]).rows
    found = {row.values["line"]: row.values for row in reliability_table([sure, silent]).rows}
    assert found["silent"]["drafts"] == found["silent"]["error"] == NONE
    assert found["sure"]["drafts"] == 3 and found["sure"]["accepted"] == pytest.approx(1 / 3)
    assert found["sure"]["error"] == pytest.approx((0.39 + 0.21 + 1) / 3) and found["sure"]["auc"] == 0.5
    table = bins_table([sure, silent])
    bins = {row.values["bin"]: row.values for row in table.rows}
    assert len(bins) == 10 and bins["0.6-0.7"]["accepted"] == 1 and bins["0.9-1.0"]["accepted"] == 0
    assert bins["0.0-0.1"] == bins["0.0-0.1"] | {"drafts": 0, "accepted": None}
    places = {(row.values["line"], row.values["position"]): row.values for row in position_table([sure, silent]).rows}
    assert places["sure", 1]["confidence"] == pytest.approx(0.805) and places["silent", 1]["confidence"] == NONE
    assert places["sure", 2]["error"] == pytest.approx(0.21) and places["sure", 3]["confidence"] is None
    assert [name for name, draw in figures_of({table.name: table}) if draw()] == ["reliability_bins"]
