"""Any change to a file of a record gives a clean report, or a line that names the file: never a traceback."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from spec_lab.config.run import AcceptanceConfig
from spec_lab.core.errors import UserError
from spec_lab.options.acceptance.relaxed_thinking import RelaxedThinking
from spec_lab.options.acceptance.strict import Strict
from spec_lab.record.runs import load_categories, load_positions, load_requests, load_rounds, load_runs, search_runs
from spec_lab.record.sinks import VERIFY_ROWS_FILE
from spec_lab.record.verify_rows import ARRAYS, load_verify_rows
from spec_lab.report.__main__ import main
from spec_lab.rescore.judge import rescore
from tests.damage import changed, changed_bytes, written
from tests.fake_runs import MAIN, make_info, record_run
from tests.test_rescore import write_run
from tests.test_study import DELTA, STRICT, FakeRun

RUNS = ("strict", "delta", "eager", "round")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of two rules, and two graph modes side by side; with references, categories and rounds."""
    base = tmp_path_factory.mktemp("records")
    FakeRun(STRICT, 3, [2, 2, 1], num_requests=4).record(base / "strict")
    FakeRun(DELTA, 3, [3, 2, 1], num_requests=4, minute=1).record(base / "delta")
    for minute, mode in enumerate(("eager", "round"), start=2):
        config = {
            "batch_size": 1,
            "drafter": {"name": "eagle3", "num_draft_tokens": MAIN.num_draft_tokens},
            "graph": {"name": mode},
        }
        record_run(base / mode, info=make_info(config, started_at=f"2026-01-02T03:{minute:02d}:00+00:00"))
    (base / "sweep.json").write_text('{"jobs": 2, "finished": 2}')
    return base


def report(*folders: Path) -> tuple[int, str, list[str]]:
    """Exit code, output and the lines on stderr; with several folders nothing is drawn."""
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        code = main([str(folder) for folder in folders])
    return code, output.getvalue(), errors.getvalue().splitlines()


def check_report(records: Path, path: Path, data: bytes) -> None:
    """The other runs are shown whatever became of `path`, and a run that is left out is named with it."""
    others = [name for name in RUNS if path.parent != records / name]
    with written(path, data):
        code, output, errors = report(*(records / name for name in RUNS))
        assert code == 0
        errors = [line for line in errors if not line.startswith("not compared with #")]
        assert len(errors) <= 1, errors
        assert all(str(path) in line or str(path.parent) in line for line in errors)
        assert all(line.startswith(("left out", "nothing is compared", "not compared: ")) for line in errors), errors
        assert all(str(records / name) in output for name in others)
        assert "left out: " in "".join(errors) or str(path.parent) in output or path.parent == records
        if path.name == "summary.json":
            alone, output, errors = report(path.parent, path.parent)
            assert alone == (2 if any(line.startswith("left out:") for line in errors) else 0)
            assert bool(output) == (alone == 0)


def check_error(folder: Path, read: Callable[[], object]) -> None:
    """What is read is whole, or there is one line that names the file, or the rule that wants thinking markers."""
    try:
        read()
    except UserError as error:
        line = str(error)
        if not (str(folder) in line or "use acceptance=strict" in line) or not line.isprintable():
            pytest.fail(line)


FAST = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
EXAMPLES = int(os.environ.get("SPEC_LAB_EXAMPLES", "8"))
MANY = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))


def change_of_a_summary(records: Path, data: st.DataObject) -> tuple[Path, bytes]:
    path = records / data.draw(st.sampled_from(RUNS)) / "summary.json"
    return path, json.dumps(data.draw(changed(json.loads(path.read_bytes())))).encode("utf-8")


def change_of_bytes(records: Path, data: st.DataObject) -> tuple[Path, bytes]:
    files = [
        *(f"{run}/{name}" for run in RUNS for name in ("summary.json", "requests.jsonl", "rounds.jsonl")),
        "sweep.json",
    ]
    path = records / data.draw(st.sampled_from(files))
    return path, data.draw(changed_bytes(path.read_bytes()))


def change_of_a_line(records: Path, data: st.DataObject) -> tuple[Path, bytes]:
    path = records / data.draw(st.sampled_from(RUNS[:2])) / "requests.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    index = data.draw(st.integers(0, len(lines) - 1))
    lines[index] = json.dumps(data.draw(changed(json.loads(lines[index])))).encode() + b"\n"
    return path, b"".join(lines)


CHANGES = {"summary": change_of_a_summary, "line": change_of_a_line, "bytes": change_of_bytes}


@pytest.mark.parametrize("kind", CHANGES)
@MANY
@given(data=st.data())
def test_a_changed_file_costs_a_line(kind: str, records: Path, data: st.DataObject) -> None:
    check_report(records, *CHANGES[kind](records, data))


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_plots_of_changed_files_are_drawn_or_missed(records: Path, data: st.DataObject) -> None:
    path, content = change_of_a_summary(records, data)
    with written(path, content):
        code, output, errors = report(records)
        assert code == 0
        assert "Definitions" in output
        assert all(
            line.startswith(("left out", "nothing is compared", "not compared", "plot not")) for line in errors
        ), errors


@FAST
@given(data=st.data())
def test_frames_of_changed_files(records: Path, data: st.DataObject) -> None:
    """What notebooks read: a frame, or an error that names the file."""
    path, content = CHANGES[data.draw(st.sampled_from(list(CHANGES)))](records, data)
    with written(path, content):
        for run in search_runs([records]).runs:
            load_categories(run.summary)
            load_positions(run.summary)
        for load in (load_requests, load_rounds):
            check_error(path.parent, partial(load, path.parent))
        if path.name != "summary.json":
            assert len(load_runs(records)) == len(RUNS)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept") / "run"
    write_run(folder, Strict())
    return folder


RULES: list[AcceptanceConfig] = [
    Strict(),
    RelaxedThinking(topk=3, delta=0.5),
    RelaxedThinking(topk=3, phase="round"),  # type: ignore[arg-type]
]


def judge(folder: Path) -> None:
    """By every kind of rule."""
    for rule in RULES:
        check_error(folder, partial(rescore, folder, rule))


@FAST
@given(data=st.data())
def test_changed_bytes_of_verify_rows(kept: Path, data: st.DataObject) -> None:
    path = kept / data.draw(st.sampled_from([VERIFY_ROWS_FILE, "requests.jsonl"]))
    with written(path, data.draw(changed_bytes(path.read_bytes()))):
        judge(kept)


@FAST
@given(data=st.data())
def test_changed_values_of_verify_rows(
    kept: Path, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of arrays of another shape, type or range, and of the requests they are said to be of."""
    rows = load_verify_rows(kept)
    arrays = {name: getattr(rows, name) for name in ARRAYS}
    name = data.draw(st.sampled_from(ARRAYS))
    kind = data.draw(st.sampled_from(["value", "dtype", "shape", "cut", "none", "origin"]))
    origin = asdict(rows.origin)
    if kind == "value":
        array = arrays[name].copy()
        values = [-1, 2**31 - 1, -(2**31), 7] if array.dtype.kind == "i" else [np.nan, np.inf, -1.0, 1e38]
        array.flat[data.draw(st.integers(0, array.size - 1))] = data.draw(st.sampled_from(values))
        arrays[name] = array
    elif kind == "dtype":
        arrays[name] = arrays[name].astype(data.draw(st.sampled_from(["float64", "int64", "bool", "uint8", "int16"])))
    elif kind == "shape":
        arrays[name] = arrays[name][None].copy()
    elif kind == "cut":
        arrays[name] = arrays[name][:-1].copy()
    elif kind == "none":
        del arrays[name]
    else:
        origin = data.draw(changed(origin))
    folder = tmp_path_factory.mktemp("changed")
    shutil.copyfile(kept / "requests.jsonl", folder / "requests.jsonl")
    save_file(arrays, folder / VERIFY_ROWS_FILE, metadata={"origin": json.dumps(origin)})
    judge(folder)
