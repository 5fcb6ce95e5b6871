"""A disk that fills up, or memory that is not there: one line that names the knob, and a record that says failed."""

from __future__ import annotations

import errno
import json
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.__main__ import main
from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.checkpoints.families.table import read_model_config
from spec_lab.core.errors import Breakdown, UserError
from spec_lab.models.target_loader import WeightSource, load_target
from spec_lab.program.folder import room_under
from spec_lab.record import amend
from spec_lab.record.amend import amend_status
from spec_lab.record.sinks import SUMMARY_FILE
from spec_lab.wiring.memory import memory_of, room_for
from tests.covering import each_value
from tests.fake_runner import FakeRunner, summaries
from tests.tiny_checkpoints import make_tiny_target

FULL = [errno.ENOSPC, errno.EDQUOT, errno.EFBIG]
OUT_OF_MEMORY = [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: error 12")]


def full(code: int = errno.ENOSPC, *place: str) -> OSError:
    return OSError(code, "No space left", *place)


def fail(*_: Any, **__: Any) -> None:
    raise full()


@pytest.mark.parametrize(
    ("place", "code", "begins"), each_value([(), ("outputs/run/rounds.jsonl",)], FULL, [False, True])
)
def test_a_disk_that_fills_up_in_a_run_is_one_line_and_a_failed_record(
    place: tuple[str, ...],
    code: int,
    begins: bool,
    runner: FakeRunner,
    empty_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runner.begins, runner.error = begins, full(code, *place)
    assert main(["output_dir=out"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    where = f" ({place[0]})" if place else ""
    assert line == f"failed: output_dir=out: No space left{where}; free some space there"
    [summary] = summaries(empty_folder).values()
    assert (summary["status"], summary["reason"].startswith("OSError: ")) == ("failed", True)


def test_the_record_says_failed_though_no_new_file_can_be_written(
    runner: FakeRunner, empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.error = full()
    monkeypatch.setattr(amend, "write_json", fail)
    assert main([]) == 1
    [summary] = summaries(empty_folder).values()
    assert summary["status"] == "failed"


def test_a_record_that_would_not_fit_into_its_place_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amend, "write_json", fail)
    (tmp_path / SUMMARY_FILE).write_text('{"status": "interrupted"}')
    with pytest.raises(OSError):
        amend_status(tmp_path, "failed", "x" * 100_000)
    assert json.loads((tmp_path / SUMMARY_FILE).read_text()) == {"status": "interrupted"}
    amend_status(tmp_path, "failed", "x")
    assert json.loads((tmp_path / SUMMARY_FILE).read_text()) == {"status": "failed", "reason": "x"}


def test_a_disk_without_room_for_the_first_record_leaves_nothing(
    runner: FakeRunner, empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("spec_lab.cli.job.write_status", fail)
    assert main(["-m", "seed=1,2"]) == 1
    assert set(capsys.readouterr().err.splitlines()) == {
        "failed: output_dir=outputs: No space left; free some space there"
    }
    assert not runner.calls and not summaries(empty_folder)


def test_a_disk_that_is_full_when_a_sweep_ends_names_its_folder(
    runner: FakeRunner, empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("spec_lab.program.folder.write_json", fail)
    assert main(["-m", "seed=1"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("failed: outputs/run-sweep-") and line.endswith(": No space left")


@pytest.mark.parametrize(
    ("begins", "error", "line"),
    [
        (False, PermissionError(errno.EACCES, "Permission denied", "head/x.json"), "head/x.json: Permission denied"),
        (False, OSError(errno.EIO, "Input/output error", "x.safetensors"), "x.safetensors: Input/output error"),
        (False, MemoryError(), "there is not enough memory"),
        (True, OUT_OF_MEMORY[1], "there is not enough memory"),
    ],
)
def test_what_the_machine_refuses_is_one_line(
    begins: bool,
    error: Exception,
    line: str,
    runner: FakeRunner,
    empty_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before a run has begun the user can choose another file or size, and nothing is left of it."""
    runner.begins, runner.error = begins, error
    is_failure = begins or getattr(error, "errno", None) == errno.EIO
    assert main([]) == (1 if is_failure else 2)
    [printed] = capsys.readouterr().err.splitlines()
    assert printed.startswith(f"{'failed' if is_failure else 'refused'}: {line}")
    assert [summary["status"] for summary in summaries(empty_folder).values()] == ["failed"] * is_failure


def test_a_run_whose_folder_is_deleted_says_so(
    runner: FakeRunner,
    empty_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(chosen: Any, choices: Any, folder: Path) -> None:
        shutil.rmtree(folder)
        amend_status(folder, "finished", "")

    monkeypatch.setattr(sys.modules["spec_lab.measure.runner"], "run", run)
    assert main([]) == 1
    said = capsys.readouterr().err
    assert "was moved or deleted while the run wrote to it; leave it there" in said
    assert "Traceback" not in said and not summaries(empty_folder)


def test_absolute_paths_stay_out_of_the_reason_of_a_failure(runner: FakeRunner, empty_folder: Path) -> None:
    runner.error = ValueError("cannot read '/home/ann/my data/head.bin' nor /scratch/ann/target/config.json: no")
    assert main([]) == 1
    [summary] = summaries(empty_folder).values()
    assert summary["reason"] == "ValueError: cannot read 'head.bin' nor config.json: no"


def test_a_cache_beyond_the_memory_is_refused_before_it_is_tried() -> None:
    cpu = torch.device("cpu")
    needs_more = r"cache.num_pages=9 .* needs .* GiB, cpu has .* use cache.num_pages=null"
    room = room_for(memory_of(cpu) + 1, "a cache of cache.num_pages=9 pages", cpu)
    with pytest.raises(UserError, match=needs_more), room:
        raise AssertionError("it was tried")
    with room_for(1, "a cache", cpu):
        pass


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_a_cache_for_which_there_is_no_room_left_is_refused(error: Exception) -> None:
    room = room_for(1, "a cache", torch.device("cpu"))
    with pytest.raises(UserError, match=r"has less free; use cache.num_pages=null"), room:
        raise error


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_weights_for_which_there_is_no_room_are_refused_with_what_makes_them_smaller(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any, **__: Any) -> None:
        raise error

    make_tiny_target(tmp_path, "llama")
    monkeypatch.setattr("spec_lab.models.target_loader.open_tensors", no_room)
    source = WeightSource(tmp_path, torch.float32, torch.device("cpu"))
    with pytest.raises(UserError, match=rf"weights of {tmp_path}; use a smaller model or dtype=bfloat16$"):
        load_target(read_model_config(tmp_path), source, TorchAttention(4, 64), 64)


@pytest.mark.parametrize("error", [full(), RuntimeError("while serializing: No space left on device (os error 28)")])
def test_a_disk_that_fills_up_under_texts_or_a_training_names_the_folder(error: Exception) -> None:
    with (
        pytest.raises(Breakdown, match=r"^output_dir=out: .*No space left.*free some space"),
        room_under(Path("out")),
    ):
        raise error
    another = PermissionError(errno.EACCES, "Permission denied")
    with pytest.raises(PermissionError), room_under(Path("out")):
        raise another


def test_another_error_in_making_a_cache_is_ours() -> None:
    with pytest.raises(RuntimeError, match="shape"), room_for(1, "a cache", torch.device("cpu")):
        raise RuntimeError("a wrong shape")


def test_a_real_run_whose_files_may_not_grow_says_so_in_a_line(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system's limit stands in for a full disk: the record fits under it, the rows do not."""
    command = [
        "debug=smoke",
        "drafter=none",
        "workload.limit=1",
        "max_new_tokens=100",
        "kernels=torch",
        "references=[]",
    ]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        code = main([*command, "profile_rounds=0", "num_threads=1"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert code == 1 and "Traceback" not in said
    assert said.splitlines()[-1].startswith("failed: output_dir=outputs: File too large")
    [summary] = summaries(empty_folder).values()
    assert summary["status"] == "failed"
