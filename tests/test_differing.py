"""What tells runs apart: knobs in a frame, in the table of runs and in the names of figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from spec_lab.record.runs import find_runs
from spec_lab.record.scalars import scalars
from spec_lab.report.differing import differing_knobs, distinct_words
from spec_lab.report.frame import load_frame
from spec_lab.report.run_table import format_runs
from tests.fake_runs import make_info, make_summary, record_run


def with_offset(offset: int | None) -> dict[str, object]:
    own = {} if offset is None else {"offset": offset}
    return {
        "batch_size": 1,
        "seed": 0,
        "name": f"run{offset}",
        "drafter": {"name": "own", "num_draft_tokens": 3, **own},
    }


def record_three(folder: Path) -> None:
    for offset in (1, 2, None):
        record_run(folder / str(offset), info=make_info(with_offset(offset)))


def test_a_knob_that_only_some_runs_have_differs() -> None:
    assert differing_knobs([with_offset(1), with_offset(2)]) == ["drafter.offset"]
    assert differing_knobs([with_offset(1), with_offset(None)]) == ["drafter.offset"]
    assert differing_knobs([with_offset(1), with_offset(1)]) == []


def test_a_frame_has_a_column_for_a_knob_from_outside(tmp_path: Path) -> None:
    record_three(tmp_path)
    frame = load_frame(tmp_path)
    own = frame[frame["part"] == "this run"]
    assert own["drafter.offset"].tolist()[:2] == [1, 2] and own["drafter.offset"].isna().tolist()[2]
    summary = find_runs([tmp_path])[0].summary
    rates = summary["acceptance_rate_by_position"]
    assert own["accepted_at_2_if_reached"].tolist()[0] == rates["conditional"][1] != rates["unconditional"][1]
    assert own["kernel_gemm_us"].tolist()[0] == 900.0 and str(frame["kernel_gemm_us"].dtype) == "float64"
    order = [name for name in frame.columns if name in ("drafter", "drafter.offset", "accepted_at_1", "version_torch")]
    assert order == ["drafter", "drafter.offset", "accepted_at_1", "version_torch"]


def test_no_two_rows_read_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_three(tmp_path)
    runs = find_runs([tmp_path])
    monkeypatch.setenv("COLUMNS", "200")
    header, _, *lines = format_runs(runs).splitlines()[:5]
    assert "drafter.offset" in header and len({line[3:] for line in lines}) == 3
    words = distinct_words([run.summary for run in runs])
    assert len(set(words)) == 3 and words[0].endswith("drafter.offset=1")


def test_runs_that_differ_in_an_option_alone_are_told_apart(tmp_path: Path) -> None:
    """graph=full_loop and graph=split_seed have the same keys."""
    graphs = ("full_loop", "split_seed")
    for graph in graphs:
        record_run(tmp_path / graph, info=make_info(with_offset(1) | {"graph": {"name": graph, "verify": True}}))
    runs = find_runs([tmp_path])
    header, _, *lines = (line.split() for line in format_runs(runs).splitlines()[:4])
    assert [line[header.index("graph")] for line in lines] == list(graphs)
    words = distinct_words([run.summary for run in runs])
    assert [text.rpartition(", ")[2] for text in words] == [f"graph={graph}" for graph in graphs]


def test_positions_and_stages_are_scalars() -> None:
    summary = make_summary()
    found = scalars(summary)
    rates = summary["acceptance_rate_by_position"]
    assert found["summary.acceptance_rate_by_position.conditional.2"] == rates["conditional"][1]
    assert found["summary.stage_ms_per_round.verify"] == summary["stage_ms_per_round"]["verify"]
    assert "summary.stage_ms_per_round.graph" not in found, "no round had that stage"
