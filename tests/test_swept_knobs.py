"""A knob that some of the swept options have, and the help of one group."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from spec_lab.__main__ import main
from spec_lab.cli.swept_knobs import with_forced_knobs
from spec_lab.core.errors import UserError
from spec_lab.program.options import run_menu
from spec_lab.record.runs import find_runs
from tests import recorded_runner


def forced(*arguments: str) -> tuple[list[str], tuple[str, ...]]:
    return with_forced_knobs(arguments, run_menu())


def test_a_knob_of_some_swept_options_is_forced() -> None:
    assert forced("-m", "drafter=eagle3,ngram", "drafter.window=8", "seed=1") == (
        ["-m", "drafter=eagle3,ngram", "++drafter.window=8", "seed=1"],
        ("drafter.window",),
    )


def test_a_knob_of_all_or_without_a_sweep_is_left_alone() -> None:
    for arguments in (["drafter=eagle3,ngram", "drafter.num_draft_tokens=2"], ["drafter=ngram", "drafter.window=8"]):
        assert forced(*arguments) == (arguments, ())


def test_a_sweep_of_all_options_is_as_if_they_were_listed() -> None:
    assert forced("-m", "acceptance=glob(*,exclude=s*)", "acceptance.epsilon=0.1")[1] == ("acceptance.epsilon",)
    with pytest.raises(UserError, match="and none of strict, synthetic reads it"):
        forced("acceptance=glob(s*)", "acceptance.epsilon=0.1")


def test_a_knob_of_none_is_refused_with_its_owners() -> None:
    with pytest.raises(UserError, match="belongs to typical, and none of strict, fly reads it"):
        forced("acceptance=strict,fly", "acceptance.epsilon=0.1")


def test_a_sweep_takes_it_where_it_belongs(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job without the knob runs once, whatever values it has elsewhere."""
    monkeypatch.setitem(sys.modules, "spec_lab.measure.runner", recorded_runner.stand_in())
    assert main(["-m", "acceptance=strict,relaxed_thinking", "acceptance.topk=3,4"]) == 0
    out = capsys.readouterr().out
    assert out.count("left out: an earlier job is the same, since acceptance.topk belongs to another option") == 1
    runs = find_runs([empty_folder / "outputs"])
    assert sorted(run.summary["config"]["acceptance"].get("topk", 0) for run in runs) == [0, 3, 4]


def test_help_of_a_group_shows_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help", "drafter"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("drafter: ") and "drafter.num_draft_tokens" in out
    assert "acceptance=" not in out and "batch_size" not in out
    assert main(["--help", "drafte"]) == 2
    assert "did you mean drafter?" in capsys.readouterr().err
