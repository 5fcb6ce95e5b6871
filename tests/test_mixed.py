"""What auto took differently for runs that stand side by side: it is said, and such rates are not compared."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spec_lab.__main__ import main as run_main
from spec_lab.menu.choices import KernelsChoice
from spec_lab.program.mixed import MixNote
from spec_lab.record.mixed import are_mixed, mixed_by_auto
from spec_lab.record.runs import find_runs
from spec_lab.report.__main__ import main
from spec_lab.report.comparable import numbered
from spec_lab.report.frame import load_frame
from spec_lab.report.paired_table import compare
from tests.fake_runs import PROVENANCE, make_info, record_run
from tests.lab import make_config

SAID = "auto took for some of these runs kernels=native and for others kernels=torch: their times differ by that too"
AUTO = ["attention", "kernels"]


def record(folder: Path, minute: int, kernels: str, auto: list[str], device: str = "cpu") -> None:
    """Record a run of which `kernels` was chosen by auto, or was named."""
    config = make_info().config | {"kernels": kernels, "auto": auto, "attention": {"name": "torch"}}
    info = make_info(config, started_at=f"2026-01-01T00:{minute:02d}:00+00:00")
    record_run(folder, info=replace(info, provenance=replace(PROVENANCE, device=device, device_name=device)))


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Three runs alike, but for what auto took for the last."""
    for minute, kernels in enumerate(("native", "native", "torch")):
        record(tmp_path / f"run{minute}", minute, kernels, AUTO)
    return tmp_path


def test_the_report_tells_them_apart(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(mixed)]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    column = lines[0].split().index("kernels")
    assert [line.split()[column] for line in lines[2:5]] == ["native", "native", "torch"]
    assert f"{SAID}, and kernels=torch is the same for all" in " ".join(lines)
    compared, _ = compare(numbered(find_runs([mixed])))
    assert [row.speedup is None for row in compared] == [True, False, True]
    assert compared[2].speedup_verdict == "other auto options"
    frame = load_frame(mixed).query("part == 'this run'")
    assert list(frame["kernels"]) == ["native", "native", "torch"] and set(frame["auto"]) == {"attention kernels"}


@pytest.mark.parametrize(("auto", "device"), [([], "cpu"), (AUTO, "cuda")], ids=["one was named", "another device"])
def test_what_was_meant_is_no_mix(
    auto: list[str], device: str, mixed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(mixed / "run2")
    record(mixed / "run2", 2, "torch", auto, device)
    assert main([str(mixed)]) == 0
    assert "auto took for some" not in capsys.readouterr().out
    compared, _ = compare(numbered(find_runs([mixed])))
    assert (compared[2].speedup is None) is (device == "cuda")


def test_options_of_groups_and_old_records() -> None:
    ours: dict[str, Any] = {"graph": {"name": "round"}, "kernels": "triton", "auto": ["graph", "kernels"]}
    theirs = ours | {"graph": {"name": "eager"}}
    assert are_mixed(ours, theirs) and not are_mixed(ours, ours) and not are_mixed(ours, {"graph": {"name": "eager"}})
    assert list(mixed_by_auto([ours, theirs, {}])) == ["graph"]
    assert "graph=eager is the same for all" in mixed_by_auto([ours, theirs])["graph"]


def test_a_sweep_says_it_once(capsys: pytest.CaptureFixture[str]) -> None:
    note = MixNote()
    for kernels in (KernelsChoice.native, KernelsChoice.native, KernelsChoice.torch, KernelsChoice.torch):
        note.see(make_config((Path(), Path()), "none", kernels=kernels, auto=AUTO))
    printed = capsys.readouterr().err
    assert printed.startswith(SAID) and printed.count("\n") == 1


def test_a_typed_sweep_is_warned_of(
    empty_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spec_lab.menu.auto.problem_of_native", lambda: None)
    assert run_main(["-m", "--dry-run", "device=cpu", "dtype=float32,bfloat16"]) == 0
    out, err = capsys.readouterr()
    assert SAID in err and err.count("\n") == 1
    assert out.count("nothing is refused") == 2
