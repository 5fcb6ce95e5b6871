"""What a run leaves in its folder: complete when it finished, valid when it did not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from omegaconf import OmegaConf

from spec_lab.core.errors import UserError
from spec_lab.core.results import GraphCounts
from spec_lab.record import provenance, schema
from spec_lab.record.measured import Divergence, Measured
from spec_lab.record.provenance import collect_provenance, git_revision
from spec_lab.record.reading import read_request_rows, read_round_rows, read_summary
from spec_lab.record.recorder import Recorder, write_status
from spec_lab.record.row_schema import RequestRow, RoundRow
from spec_lab.record.schema import Summary
from spec_lab.record.sinks import FileSink, LineFile, write_json
from spec_lab.record.summary import build_summary
from tests.fake_runs import MAIN, PLAIN, PROVENANCE, make_info, make_summary, measure, record_run

ROOT = Path(__file__).parents[1]
RECORD = ["config.yaml", "requests.jsonl", "rounds.jsonl", "summary.json"]
CONTRACT = {
    "status", "config", "versions", "git_revision", "acceptance_length", "acceptance_length_all", "acceptance_imposed",
    "acceptance_rate_by_position", "rounds", "emitted_tokens", "output_tokens", "decode_tokens_per_second",
    "end_to_end_tokens_per_second", "references", "speedup", "latency_ms", "stage_ms_per_round",
    "prefill_ms_per_request", "kernels", "rows", "graph", "accuracy", "by_category", "divergence", "schema_version",
}  # fmt: skip


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def assert_fits(value: Any, layout: Any, where: str = "summary") -> None:
    """Check that each TypedDict inside has exactly its keys."""
    options = [part for part in get_args(layout) if part is not type(None)]
    if hasattr(layout, "__total__"):
        hints = get_type_hints(layout)
        assert set(value) == set(hints), where
        for key, hint in hints.items():
            assert_fits(value[key], hint, f"{where}.{key}")
    elif isinstance(value, list):
        for item in value:
            assert_fits(item, options[0], f"{where}[]")
    elif isinstance(value, Mapping) and len(options) == 2:
        for key, item in value.items():
            assert_fits(item, options[1], f"{where}.{key}")
    elif isinstance(value, Mapping) and len(options) == 1:
        assert_fits(value, options[0], where)


def test_a_finished_run_leaves_the_whole_record(tmp_path: Path) -> None:
    summary = record_run(tmp_path / "run")

    written = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert written == summary
    assert set(written) >= CONTRACT
    assert_fits(written, Summary)
    assert written["status"] == "finished"
    assert OmegaConf.to_container(OmegaConf.load(tmp_path / "run" / "config.yaml")) == summary["config"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == RECORD


def test_lines_have_a_row_a_request_and_a_round(tmp_path: Path) -> None:
    summary = record_run(tmp_path)
    requests, rounds = read_lines(tmp_path / "requests.jsonl"), read_lines(tmp_path / "rounds.jsonl")
    for row in requests:
        assert_fits(row, RequestRow, "request")
    for row in rounds:
        assert_fits(row, RoundRow, "round")
    assert len(requests) == summary["num_requests"]
    assert sum(sum(row["emitted_per_round"]) for row in requests) == summary["emitted_tokens"]
    assert [row["id"] for row in requests if row["divergence"]] == ["r1"]
    assert requests[0]["finish_reason"] == "length"
    assert requests[2]["correct"] is None
    assert len([row for row in rounds if row["repeat"] == 2]) == summary["verify_calls"]
    assert {row["repeat"] for row in rounds} == {0, 1, 2}


def test_medians_over_repeats_and_counts_of_the_first() -> None:
    """Repeats at 1, 1.02 and 0.99 of the time: the median round is the first's, the rows are not added up."""
    summary = make_summary()
    first = MAIN.generate()
    assert summary["round_ms"] == pytest.approx(1e3 * first.rounds[0].seconds)
    assert summary["stage_ms_per_round"]["recur"] == pytest.approx(0.7)
    assert summary["rows"]["catchup_live"] == summary["rounds"] == len(first.rounds)
    assert [repeat["seconds"] for repeat in summary["repeats"]] == pytest.approx(
        [first.seconds, 1.02 * first.seconds, 0.99 * first.seconds]
    )
    assert summary["repeats_identical"] is True


def test_graphs_are_counted_up_to_the_last_repeat() -> None:
    """The engine's counts go on from repeat to repeat."""
    repeats = [MAIN.generate(), MAIN.generate()]
    repeats[0].graph, repeats[1].graph = GraphCounts("round", 2, 7), GraphCounts("round", 3, 15)
    graph = make_summary(main=Measured(repeats), references={})["graph"]
    assert (graph["mode"], graph["captures"], graph["replays"]) == ("round", 3, 15)


def test_references_and_what_is_measured_against_them() -> None:
    summary = make_summary()
    assert set(summary["references"]) == {"plain", "unpruned"}
    plain = summary["references"]["plain"]
    assert plain["acceptance_length"] is None
    assert plain["stage_ms_per_round"]["catchup"] is None
    assert plain["graph"]["mode"] == "eager"
    assert summary["speedup"] is not None
    assert summary["speedup"]["over"] == "plain"
    assert summary["speedup"]["low"] < summary["speedup"]["value"] < summary["speedup"]["high"]
    assert summary["pruning_speedup"] is not None
    assert summary["pruning_speedup"]["over"] == "unpruned"
    assert summary["references"]["unpruned"]["rows"]["catchup_computed"] == 4 * summary["rows"]["catchup_computed"]


def test_by_category_splits_the_run() -> None:
    summary = make_summary()
    parts = summary["by_category"].values()
    assert sum(part["rounds"] for part in parts) == summary["rounds"]
    assert sum(part["accuracy"]["n"] for part in parts) == summary["accuracy"]["n"] == 8
    assert summary["by_category"]["prose"]["accuracy"]["n"] == 0


def test_repeats_that_differ_are_said_to() -> None:
    repeats = [MAIN.generate(seed=seed) for seed in (0, 0, 1)]
    summary = make_summary(main=Measured(repeats))
    assert summary["repeats_identical"] is False
    assert "repeats differ" in summary["verdict"]
    assert make_summary(main=measure(MAIN, (1.0,)), references={})["repeats_identical"] is None


def test_without_references_there_is_no_speedup() -> None:
    summary = make_summary(references={}, divergences=None)
    for key in ("speedup", "pruning_speedup", "break_even_acceptance_length"):
        assert summary[key] is None
    assert summary["divergence"] is None


def test_plain_decoding_has_no_acceptance() -> None:
    summary = make_summary(main=measure(PLAIN), references={"plain": measure(PLAIN)})
    assert summary["num_draft_tokens"] == 0
    assert summary["acceptance_length"] is summary["acceptance_length_all"] is None
    assert summary["acceptance_rate_by_position"]["unconditional"] == []
    assert summary["break_even_acceptance_length"] is None
    assert summary["emitted_tokens"] == summary["rounds"] > 0


def test_divergences_are_counted_by_kind() -> None:
    kinds = ["near_tie", "near_tie", "bug", "lossy"]
    found = [Divergence(f"r{index}", 0, None, kind) for index, kind in enumerate(kinds)]  # type: ignore[arg-type]
    summary = make_summary(divergences=found)
    assert summary["divergence"] == {
        "requests": 12, "diverged": 4, "near_ties": 2, "bugs": 1, "lossy": 1, "median_index": 0, "median_margin": None,
    }  # fmt: skip


def test_a_result_without_rounds(tmp_path: Path) -> None:
    """max_new_tokens=1: the prompt pass gives the only token."""
    engine = replace(MAIN, max_new_tokens=1)
    summary = make_summary(
        main=measure(engine),
        references={"plain": measure(replace(PLAIN, max_new_tokens=1)), "unpruned": measure(engine)},
    )
    assert summary["rounds"] == 0
    assert summary["output_tokens"] == 12
    for key in ("acceptance_length", "decode_tokens_per_second", "speedup"):
        assert summary[key] is None
    assert json.dumps(summary, allow_nan=False)
    assert_fits(summary, Summary)


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (RuntimeError("out of memory"), "failed", "RuntimeError: out of memory"),
        (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt"),
    ],
)
def test_an_exception_is_recorded_and_raised_on(tmp_path: Path, error: BaseException, status: str, reason: str) -> None:
    with pytest.raises(type(error)), Recorder(tmp_path, make_info()) as recorder:
        recorder.rounds(0, MAIN.generate().rounds)
        raise error
    summary = read_summary(tmp_path)
    assert (summary["status"], summary["reason"]) == (status, reason)
    assert_fits(summary, Summary)
    assert len(read_lines(tmp_path / "rounds.jsonl")) > 0


def test_an_exception_after_the_end_leaves_the_finished_record(tmp_path: Path) -> None:
    with pytest.raises(BrokenPipeError), Recorder(tmp_path, make_info()) as recorder:
        recorder.finish(make_summary())
        raise BrokenPipeError
    assert read_summary(tmp_path)["status"] == "finished"


def test_a_record_that_is_no_json_makes_the_run_a_failure(tmp_path: Path) -> None:
    broken = make_summary()
    broken["decode_tokens_per_second"] = float("nan")
    with pytest.raises(ValueError, match="not JSON compliant"), Recorder(tmp_path, make_info()) as recorder:
        recorder.finish(broken)
    assert read_summary(tmp_path)["status"] == "failed"


def test_another_sink_that_cannot_start_fails_the_run_in_the_files(tmp_path: Path) -> None:
    class Unreachable(FileSink):
        def start(self, folder: Path, summary: Summary) -> None:
            raise ValueError("no server")

    with pytest.raises(ValueError, match="no server"), Recorder(tmp_path, make_info(), [Unreachable()]):
        pass
    assert read_summary(tmp_path)["reason"] == "ValueError: no server"


def test_a_killed_run_leaves_a_valid_record(tmp_path: Path) -> None:
    rounds = MAIN.generate().rounds
    child = os.fork()
    if child == 0:
        try:
            with Recorder(tmp_path, make_info()) as recorder:
                recorder.rounds(0, rounds)
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)  # an error ends the child, which would go on with the tests
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    summary = read_summary(tmp_path)
    assert summary["status"] == "interrupted"
    assert "killed" in (summary["reason"] or "")
    assert_fits(summary, Summary)
    assert len(read_lines(tmp_path / "rounds.jsonl")) == len(rounds)


def test_what_a_kill_left_beside_the_record_goes_with_the_next_write(tmp_path: Path) -> None:
    """A process that dies between opening and renaming leaves part of the new file under its temporary name."""
    names = [name for name in RECORD if not name.endswith(".jsonl")]
    for name in names:
        (tmp_path / f".{name}.tmp").write_text('{"status": "finis')
    write_status(tmp_path, make_info(), "refused", "drafter=oracle needs sampling.temperature=0")
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert read_summary(tmp_path)["status"] == "refused"


def test_every_line_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader, or a kill, between two calls sees whole lines; also where the system takes a part at a time."""
    lines = LineFile(tmp_path / "lines.jsonl")
    long = {"ids": list(range(50_000))}
    for number in range(3):
        lines.write(long)
        assert len(read_lines(tmp_path / "lines.jsonl")) == number + 1
    with pytest.raises(ValueError, match="not JSON compliant"):
        lines.write({"seconds": float("nan")})
    assert read_lines(tmp_path / "lines.jsonl") == [long] * 3

    class Hesitant:
        def __init__(self) -> None:
            self.data = b""

        def write(self, part: memoryview) -> int:
            self.data += part[:7]
            return min(len(part), 7)

    hesitant = Hesitant()
    monkeypatch.setattr(Path, "open", lambda *_, **options: hesitant)
    LineFile(tmp_path / "others.jsonl").write({"text": "ümlaut"})
    assert hesitant.data == '{"text":"ümlaut"}\n'.encode()


@pytest.mark.parametrize("name", ["requests.jsonl", "rounds.jsonl"])
def test_a_torn_last_line_is_dropped_and_a_broken_one_named(name: str, tmp_path: Path) -> None:
    record_run(tmp_path)
    read: Callable[[Path], Sequence[Any]] = read_request_rows if name == "requests.jsonl" else read_round_rows
    path = tmp_path / name
    whole, num_rows = path.read_bytes(), len(read(tmp_path))
    *_, last = whole.splitlines(keepends=True)
    for kept in (0, 1, 20, len(last) - 2):
        path.write_bytes(whole[: len(whole) - len(last) + kept])
        assert len(read(tmp_path)) == num_rows - 1
    path.write_bytes(whole[:-1])
    assert len(read(tmp_path)) == num_rows, "only the line's end is missing"
    for broken in (b"{}\n", b"{\n", b"\n", b"[1]\n", b"\xff\n", b"[" * 5000 + b"\n", b"{}"):
        path.write_bytes(whole + broken)
        with pytest.raises(UserError, match=f"{name}, line {num_rows + 1}: "):
            read(tmp_path)


def test_a_refused_run_is_recorded(tmp_path: Path) -> None:
    write_status(tmp_path / "refused", make_info(), "refused", "drafter=oracle needs sampling.temperature=0")
    summary = read_summary(tmp_path / "refused")
    assert (summary["status"], summary["rounds"], summary["speedup"]) == ("refused", 0, None)
    assert "drafter=oracle" in summary["verdict"]
    assert sorted(path.name for path in (tmp_path / "refused").iterdir()) == ["config.yaml", "summary.json"]


def test_writing_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that dies before its end leaves the old file, and no other behind."""
    path = tmp_path / "summary.json"
    write_json(path, {"status": "interrupted"})

    def die(_: int) -> None:
        assert json.loads(path.read_text()) == {"status": "interrupted"}
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", die)
    with pytest.raises(OSError, match="disk full"):
        write_json(path, {"status": "finished"})
    assert json.loads(path.read_text()) == {"status": "interrupted"}
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_of_the_old_file_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"status": "interrupted"})
    with path.open(encoding="utf-8") as reader:
        write_json(path, {"status": "finished"})
        assert json.load(reader) == {"status": "interrupted"}
    assert json.loads(path.read_text()) == {"status": "finished"}


def test_provenance_knows_versions_and_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_LAB_SECRET", "a-secret-value")
    found = collect_provenance("cpu", "float32", 2)
    text = repr(found)
    assert found.versions["torch"]
    assert found.versions["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert found.device_name == found.cpu_model
    for private in ("a-secret-value", str(Path.home()), str(Path.cwd()), sys.executable):
        assert private not in text
    assert collect_provenance().device_name is None


def test_missing_packages_have_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "PACKAGES", ("no-such-distribution",))
    assert provenance.package_versions()["no-such-distribution"] is None


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_git_revision(tmp_path: Path) -> None:
    """It is a commit, with `+dirty` once something changes; nothing outside a checkout or for a folder git does not
    track.
    """
    package = tmp_path / "repository" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    assert git_revision(package) is None
    git(package.parent, "init", "-q")
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-q", "-m", "first")
    commit = git(package.parent, "rev-parse", "HEAD")
    assert git_revision(package) == commit
    (package / "__init__.py").write_text("changed = True\n")
    assert git_revision(package) == f"{commit}+dirty"
    installed = package.parent / "venv"
    installed.mkdir()
    (installed / "__init__.py").write_text("")
    assert git_revision(installed) is None


@pytest.mark.parametrize("version", [0, 99])
def test_an_unknown_layout_is_refused(version: int, tmp_path: Path) -> None:
    write_json(tmp_path / "summary.json", make_summary() | {"schema_version": version})
    with pytest.raises(
        ValueError, match=f"{version}, but this spec_lab reads 1 or 2 or 3 or 4 or 5 or 6 or {schema.SCHEMA_VERSION}"
    ):
        read_summary(tmp_path)
    (tmp_path / "summary.json").write_text("[1, 2")
    with pytest.raises(ValueError, match="not the record of a run"):
        read_summary(tmp_path)


def test_a_summary_needs_no_torch() -> None:
    """The report stays fast: recording and reading modules do not import it."""
    modules = "sys, spec_lab.report.__main__, spec_lab.record.recorder, spec_lab.report.plots"
    code = f"import {modules}; print('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_build_summary_takes_an_unrun_configuration() -> None:
    summary = build_summary(make_info(), Measured(), seconds=0.0, status="failed", reason="it did")
    assert summary["num_draft_tokens"] is None
    counts = {
        "mode": None,
        "captures": 0,
        "replays": 0,
        "nodes": {},
        "rounds_per_replay": 1,
        "no_loop": False,
    }
    assert summary["graph"] == counts
    assert summary["launches_per_round"] is summary["host_syncs_per_round"] is summary["launch_ms"] is None
    assert summary["versions"] == PROVENANCE.versions
