"""The files of a run: whole at any time, read back as written, and silent about who ran it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from spec_lab.core.errors import UserError
from spec_lab.record.models import Run
from spec_lab.record.provenance import git_revision, machine_of
from spec_lab.record.reading import find_runs, read_requests, read_rounds, read_run
from spec_lab.record.recorder import Recorder, ended
from spec_lab.record.verdict import verdict
from tests.fake_runs import MAIN, PLAIN, make_begun, make_request, make_run, measure, record_run

ROOT = Path(__file__).parents[1]


def test_a_run_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    run = record_run(tmp_path)
    assert read_run(tmp_path) == run
    assert set(run.references) == {"plain", "unpruned"} and run.references["plain"].num_draft_tokens == 0
    requests, rounds = read_requests(tmp_path), read_rounds(tmp_path)
    assert len(requests) == run["num_requests"] == 12
    assert sum(len(request.emitted_per_round or ()) for request in requests) == run["rounds"]
    assert {row.repeat for row in rounds} == {0, 1, 2} and rounds[0].rows.catchup_live == 1
    assert requests[1].divergence is not None and requests[1].divergence.kind == "near_tie"
    assert {path.name for path in tmp_path.iterdir()} == {
        "summary.json", "config.yaml", "requests.jsonl", "rounds.jsonl"
    }  # fmt: skip


def test_numbers_are_medians_over_turns_and_counts_of_the_first() -> None:
    run = make_run()
    rates = sorted(repeat["decode_tokens_per_second"] or 0 for repeat in run.repeats)
    assert run["decode_tokens_per_second"] == rates[1]
    assert run["repeats_identical"] is True and run["divergence.near_ties"] == 1
    assert set(run.by_category) == {"code", "dates", "prose"}
    assert sum(numbers["rounds"] or 0 for numbers in run.by_category.values()) == run["rounds"]
    assert run.references["unpruned"]["speedup"] == pytest.approx(
        run.references["unpruned"]["decode_tokens_per_second"] / run.references["plain"]["decode_tokens_per_second"],
        rel=0.1,
    )
    assert run.references["plain"]["speedup"] is None
    assert run.scalars()["summary.speedup"] == run["speedup"]


def test_repeats_that_differ_are_said_to() -> None:
    main = measure(MAIN)
    other = MAIN.generate(seed=9)
    run = make_run(main=type(main)(main.requests, [main.repeats[0], other], 3, {}, True), references={})
    assert run["repeats_identical"] is False and "the repeats differ" in run.verdict


def test_the_verdict_says_what_the_record_says() -> None:
    run, lossy = make_run(notes=["somebody else was there"]), make_run(acceptance_lossless=False)
    assert f"{run['speedup.mean']:.2f}" in run.verdict and "somebody else was there" in run.verdict
    assert f"length of {run['acceptance_length']:.2f} of {run.num_draft_tokens + 1}" in run.verdict
    assert "is lossy" in lossy.verdict and f"{100 * lossy['equal_to_plain']:.1f}%" in lossy.verdict
    assert "imposed" in make_run(acceptance_imposed=True, acceptance_lossless=False).verdict
    assert make_run(main=measure(PLAIN)).verdict.startswith("Plain decoding")
    one_token = measure(replace(MAIN, max_new_tokens=1))
    assert make_run(main=one_token, references={}).verdict.startswith("no round to time")


def test_the_verdict_of_a_run_that_did_not_finish_is_its_reason() -> None:
    run = ended(make_begun(), "refused", "batch_size=0")
    assert run.verdict == verdict(run) == "The run is refused: batch_size=0."


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (RuntimeError("out of memory"), "failed", "RuntimeError: out of memory"),
        (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt"),
    ],
)
def test_an_exception_is_recorded_and_raised_on(tmp_path: Path, error: BaseException, status: str, reason: str) -> None:
    with pytest.raises(type(error)), Recorder.open(tmp_path, make_begun()) as recorder:
        assert read_run(tmp_path).status == "interrupted", "so that a kill leaves the truth"
        recorder.decoded(make_request("a", [1]))
        raise error
    run = read_run(tmp_path)
    assert (run.status, run.reason) == (status, reason)
    assert [request.id for request in read_requests(tmp_path)] == ["a"]


def test_an_exception_after_the_end_leaves_the_finished_record(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Recorder.open(tmp_path, make_begun()) as recorder:
        recorder.finish(make_run())
        raise RuntimeError
    assert read_run(tmp_path).status == "finished"


def test_another_sink_that_cannot_start_fails_the_run_in_the_files(tmp_path: Path) -> None:
    class Broken:
        def start(self, folder: Path, run: Run) -> None:
            raise ValueError("no server")

        def finish(self, run: Run) -> None: ...

    with pytest.raises(ValueError, match="no server"), Recorder.open(tmp_path, make_begun(), [Broken()]):
        pass
    assert read_run(tmp_path).reason == "ValueError: no server"


@pytest.mark.parametrize("name", ["requests.jsonl", "rounds.jsonl"])
def test_a_torn_last_line_is_dropped_and_a_broken_one_is_an_error(name: str, tmp_path: Path) -> None:
    record_run(tmp_path)
    path, read = tmp_path / name, {"requests.jsonl": read_requests, "rounds.jsonl": read_rounds}[name]
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"id": "r')
    assert len(read(tmp_path)) == len(whole.splitlines())
    path.write_bytes(b'{"id": 7}\n' + whole)
    with pytest.raises(ValidationError):
        read(tmp_path)


def test_a_record_of_another_version_is_named(tmp_path: Path) -> None:
    record_run(tmp_path / "old")
    path = tmp_path / "old" / "summary.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 7', 1))
    with pytest.raises(ValidationError, match=r"version"):
        read_run(tmp_path / "old")
    record_run(tmp_path / "new")
    with pytest.warns(UserWarning, match="left out: .*old"):
        assert [found.folder.name for found in find_runs(tmp_path)] == ["new"]
    with pytest.raises(UserError, match="no run here or below"):
        find_runs(tmp_path / "nowhere")


def test_provenance_knows_versions_and_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "somebody")
    machine = machine_of("cpu", num_threads=2)
    assert machine.versions["torch"] and machine.device_name == machine.cpu_model
    text = machine.model_dump_json()
    assert "somebody" not in text and os.uname().nodename not in text and str(Path.home()) not in text


def test_git_revision(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, env=environment)

    git("init")
    (tmp_path / "__init__.py").touch()
    assert git_revision(tmp_path) is None, "not tracked"
    git("add", "."), git("commit", "-m", "m")
    clean = git_revision(tmp_path)
    (tmp_path / "__init__.py").write_text("x")
    assert clean is not None and git_revision(tmp_path) == f"{clean}+dirty"


WITHOUT_PYDANTIC = """
import sys
sys.modules["pydantic"] = None
sys.path += [{benchmarks!r}]
import spec_lab.engine.engine, spec_lab.measure.profiling, spec_lab.record.draft_counts, spec_lab.record.times
import spec_lab.record.metric, spec_lab.app.compose, spec_kernels
import h200_round
"""


def test_engine_kernels_and_the_gpu_benchmark_import_no_pydantic() -> None:
    """The GPU machine has none."""
    program = WITHOUT_PYDANTIC.format(benchmarks=str(ROOT / "benchmarks"))
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def test_lines_are_plain_json(tmp_path: Path) -> None:
    record_run(tmp_path)
    for name in ("requests.jsonl", "rounds.jsonl"):
        for line in (tmp_path / name).read_text().splitlines():
            assert isinstance(json.loads(line), dict)
