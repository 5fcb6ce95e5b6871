"""A pipe or a device under a file's name ends in a line that names it: nobody waits, and nobody reads without end."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import zeros

from spec_lab.checkpoints.checkpoint_files import tensors_of
from spec_lab.checkpoints.families.table import read_model_config
from spec_lab.core.errors import UserError, trouble_of
from spec_lab.menu.config import WorkloadConfig
from spec_lab.program.sweep_lock import SweepLock, was_left
from spec_lab.program.yaml_file import read_yaml
from spec_lab.record.reading import read_request_rows, read_round_rows, read_summary
from spec_lab.record.trace import read_trace_file
from spec_lab.record.verify_rows import load_verify_rows
from spec_lab.report.__main__ import main as report
from spec_lab.show.__main__ import main as show
from spec_lab.sweep.ledger import Ledger
from spec_lab.workloads.limits import time_limit
from spec_lab.workloads.prompt_files import read_jsonl
from spec_lab.workloads.tokenizer import TargetTokenizer
from tests.fake_runs import record_run


def _prompts(path: Path) -> object:
    return read_jsonl(WorkloadConfig(name="jsonl", path=str(path)))


def _of_folder(read: Callable[[Path], object], path: Path) -> object:
    return read(path.parent)


READERS: dict[str, Callable[[Path], object]] = {
    "summary.json": partial(_of_folder, read_summary),
    "requests.jsonl": partial(_of_folder, read_request_rows),
    "rounds.jsonl": partial(_of_folder, read_round_rows),
    "trace.json.gz": partial(_of_folder, read_trace_file),
    "verify_rows.safetensors": partial(_of_folder, load_verify_rows),
    "config.json": partial(_of_folder, read_model_config),
    "tokenizer.json": partial(_of_folder, TargetTokenizer),
    "model.safetensors": tensors_of,
    "prompts.jsonl": _prompts,
    "sweep.yaml": read_yaml,
    "proposals.json": lambda path: Ledger(path.parent, {}),
}


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [_pipe, _endless])
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_not_read(name: str, make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / name)
    with time_limit(5), pytest.raises((UserError, OSError)) as caught:
        READERS[name](tmp_path / name)
    trouble = trouble_of(caught.value)
    assert trouble is not None and str(tmp_path) in trouble.line and "\n" not in trouble.line


def test_a_link_to_a_file_is_read(tmp_path: Path) -> None:
    save_file({"a": zeros(1)}, tmp_path / "blob")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    (tmp_path / "config.yaml").write_bytes(b"a: 1\r\nb: 2\r\n")
    assert list(tensors_of(tmp_path / "model.safetensors")) == ["a"]
    assert read_yaml(tmp_path / "config.yaml") == {"a": 1, "b": 2}


@pytest.mark.parametrize("name", ["summary.json", "requests.jsonl"])
def test_a_report_goes_on_without_such_a_run(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in "ab":
        record_run(tmp_path / run)
    path = tmp_path / "a" / name
    path.unlink()
    _pipe(path)
    with time_limit(20):
        assert report([str(tmp_path)]) == 0
        assert show([str(tmp_path / "a")]) == 2
    assert str(path) in capsys.readouterr().err


def test_a_pipe_in_the_place_of_a_lock_holds_nobody_up(tmp_path: Path) -> None:
    _pipe(tmp_path / ".lock")
    with time_limit(5):
        was_left(tmp_path)
        with pytest.raises(OSError):
            SweepLock(tmp_path).take()
