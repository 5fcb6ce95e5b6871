"""What `logger=wandb` leaves behind offline, read back byte by byte."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from PIL import Image
from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

from spec_lab.__main__ import main
from spec_lab.record.models import Run
from spec_lab.record.reading import read_run
from spec_lab.record.recorder import Recorder
from spec_lab.record.wandb_sink import PRIVATE, WandbSink
from tests.fake_runs import make_begun, record_run

HOST = "the-host-of-somebody"
ARGUMENT = "--an-argument-of-somebody"
BLOCK = 32768
HEADER = 7
DISTINCT_CONFIG = {
    "name": "run",
    "batch_size": 1,
    "drafter": {"num_draft_tokens": 3},
    "target": {"path": "checkpoints/tiny"},
}


def private_names() -> list[str]:
    """The made-up host, and the real one, which W&B's service asks the system for, unless bytes could spell it."""
    return [HOST, *(name for name in [os.uname().nodename] if len(name) > 5)]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's working directory in their home, on their machine, without a key."""
    home = tmp_path / "home" / "somebody"
    work = home / "work"
    work.mkdir(parents=True)
    monkeypatch.chdir(work)
    monkeypatch.setattr(sys, "argv", ["somebodys-program.py", ARGUMENT])
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)
    wandb.teardown()  # first: put back at the end, the address of a service that is gone would stop later tests
    for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
        monkeypatch.delenv(name)
    for name in [name for name in os.environ if name.startswith("XDG_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    yield work
    wandb.teardown()


def read_records(path: Path) -> list[Record]:
    """Read the records of a `.wandb` file: LevelDB's log format behind a header of seven bytes."""
    data, records, part, at = path.read_bytes(), [], b"", HEADER
    assert data.startswith(b":W&B")
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):
            records.append(Record.FromString(part))
            part = b""
    return records


def read_offline(folder: Path) -> list[Record]:
    wandb.teardown()  # the service may still be writing when finish() returns; this waits for it
    [path] = folder.glob("wandb/offline-run-*/*.wandb")
    return read_records(path)


def merged(updates: Any) -> dict[str, Any]:
    """Merge key and JSON pairs into one nested dict, later ones over earlier ones."""
    values: dict[str, Any] = {}
    for item in updates:
        place = values
        *parents, last = [item.key] if item.key else item.nested_key
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = json.loads(item.value_json)
    return values


def draw_a_dot(run: Run, folder: Path) -> list[Path]:
    """Stands in for the plots of a run, which take longer to draw than all else here."""
    place = folder / "wandb" / "figures"
    place.mkdir(parents=True)
    Image.new("RGB", (2, 2)).save(place / "dot.png")
    return [place / "dot.png"]


@pytest.fixture
def recorded(workplace: Path) -> tuple[Path, Run]:
    folder = workplace / "outputs" / "run"
    sink = WandbSink("a_project", group="a_sweep", draw=draw_a_dot)
    return folder, record_run(Path("outputs/run"), [sink], make_begun(DISTINCT_CONFIG))


def test_offline_run_has_every_number_by_its_dotted_name(recorded: tuple[Path, Run]) -> None:
    folder, run = recorded
    records = read_offline(folder)

    found = merged(item for record in records for item in record.summary.update)
    assert {key: found[key] for key in run.scalars()} == run.scalars(), "where W&B's sweeps look for a metric"
    assert {"summary.speedup", "summary.latency_ms.ttft.p99", "summary.rows.verified"} <= set(found)
    assert found["verdict"] == run.verdict and found["references"]["plain"]["num_draft_tokens"] == 0
    media = {"requests": "table-file", "kernel_times": "table-file", "figures/dot": "image-file"}
    assert {key: found[key]["_type"] for key in media} == media

    [sent] = [record.run for record in records if record.HasField("run")]
    config = merged(sent.config.update)
    assert {key: config[key] for key in DISTINCT_CONFIG} == DISTINCT_CONFIG
    assert config["origin"]["machine"] == run.machine.model_dump()
    assert (sent.project, sent.run_group, sent.job_type) == ("a_project", "a_sweep", "bench")
    assert (sent.host, sent.display_name) == ("not recorded", "run eagle3 catchup")
    of_no_group = {"drafter.num_draft_tokens=3", "batch_size=1"}
    assert set(sent.tags) == {f"{group}={name}" for group, name in run.choices.items()} | of_no_group
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]


def test_offline_run_has_tables_and_files(recorded: tuple[Path, Run]) -> None:
    folder, run = recorded
    records = read_offline(folder)
    [path] = folder.glob("wandb/offline-run-*/files/media/table/requests*.json")
    table = json.loads(path.read_text())
    rows = [dict(zip(table["columns"], cells, strict=True)) for cells in table["data"]]
    pooled = sum(row["acceptance_length_all"] * row["rounds"] for row in rows) / sum(row["rounds"] for row in rows)
    assert len(rows) == run["num_requests"] and pooled == pytest.approx(run["acceptance_length_all"])
    first = rows[1]
    assert (first["id"], first["category"], first["divergence"], first["text"]) == (
        "r1",
        "dates",
        "near_tie",
        "text of r1",
    )
    [artifact] = [record.artifact for record in records if record.HasField("artifact")]
    entries = {entry.path: entry.local_path for entry in artifact.manifest.contents}
    assert set(entries) == {"config.yaml", "requests.jsonl", "rounds.jsonl", "summary.json"}
    for name in ("requests.jsonl", "rounds.jsonl"):
        assert (folder / entries[name]).read_bytes() == (folder / name).read_bytes()


def test_nothing_tells_who_and_where(recorded: tuple[Path, Run], workplace: Path) -> None:
    folder, _ = recorded
    wandb.teardown()
    files = [path for path in (folder / "wandb").rglob("*") if path.is_file() or path.is_symlink()]
    assert len(files) >= 6
    for path in files:
        assert not path.is_symlink(), "a link names a path"
        for private in (*private_names(), str(workplace), ARGUMENT, "somebody", sys.executable, __file__):
            assert private.encode() not in path.read_bytes(), (private, path)


def test_a_users_path_is_cut_to_its_last_part(workplace: Path) -> None:
    """Also where the run's folder is not below the working directory."""
    secret, folder = workplace.parent / "models" / "my-llama", workplace.parents[2] / "elsewhere"
    record_run(folder, [WandbSink("p")], make_begun({"name": "run", "target": {"path": str(secret)}}))
    assert read_run(folder).config["target"]["path"] == str(secret)
    records = read_offline(folder)
    [sent] = [record.run for record in records if record.HasField("run")]
    assert merged(sent.config.update)["target"] == {"path": "my-llama"}
    [artifact] = [record.artifact for record in records if record.HasField("artifact")]
    for entry in artifact.manifest.contents:
        assert b"somebody" not in (folder / entry.local_path).read_bytes()


KILLED_RUN = """
import os, sys
from pathlib import Path
from spec_lab.record.recorder import Recorder
from spec_lab.record.wandb_sink import WandbSink
from tests.fake_runs import MAIN, make_begun
with Recorder.open(Path(sys.argv[1]), make_begun(), [WandbSink("p", mode="offline")]) as recorder:
    for record in MAIN.generate().requests:
        recorder.decoded(record)
    os.kill(os.getpid(), 9)
"""


def test_a_killed_run_tells_nothing_either(workplace: Path) -> None:
    """W&B's logs name the folder as it was given, and one of them is a link into the user's home."""
    root = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": f"{root}:{root / 'kernels'}"}
    done = subprocess.run([sys.executable, "-c", KILLED_RUN, str(workplace / "run")], env=environment, check=False)
    assert done.returncode == -9
    assert not any(path.is_symlink() or path.suffix == ".log" for path in Path("run").rglob("*"))
    assert len(Path("run/requests.jsonl").read_text().splitlines()) == 12, "every finished request has its line"
    assert read_run(Path("run")).status == "interrupted"
    for path in (path for path in Path("run").rglob("*") if path.is_file()):
        assert b"somebody" not in path.read_bytes(), path


def test_every_run_of_a_multirun_carries_its_sweep_and_its_figures(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command line, with the real figures."""
    typed = "-m drafter=ngram logger=wandb logger.mode=offline name=a_study "
    typed += "debug=smoke workload.limit=1 max_new_tokens=4 kernels=torch references=[] profile_rounds=0"
    monkeypatch.setattr(sys, "argv", ["spec_lab", *typed.split(), ARGUMENT])
    assert main(typed.split()) == 0
    [sweep] = workplace.glob("outputs/a_study-sweep-*")
    [folder] = [path.parent for path in sweep.glob("*/summary.json")]
    run, records = read_run(folder), read_offline(folder)
    found = merged(item for record in records for item in record.summary.update)
    assert {key: found[key] for key in run.scalars()} == run.scalars()
    figures = {key.removeprefix("figures/") for key in found if key.startswith("figures/")}
    assert figures == {"acceptance_by_position", "acceptance_by_category", "row_counts", "stage_times"}
    [sent] = [record.run for record in records if record.HasField("run")]
    assert (sent.run_group, sent.job_type) == (sweep.name, "bench")
    for path in sweep.glob("*/wandb/**/*"):
        for private in (*private_names(), "somebody", ARGUMENT):
            assert path.is_dir() or private.encode() not in path.read_bytes(), (private, path)


def test_a_failed_run_ends_as_failed(workplace: Path) -> None:
    with pytest.raises(RuntimeError), Recorder.open(Path("run"), make_begun(), [WandbSink("p")]):
        raise RuntimeError("out of memory")
    records = read_offline(workplace / "run")
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [1]
    assert merged(item for record in records for item in record.summary.update)["status"] == "failed"


def unreachable_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a key, and a server on a port where nothing listens."""
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setitem(PRIVATE, "init_timeout", 1)
    wandb.teardown()


def test_online_without_network_is_refused_without_the_key(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unreachable_server(monkeypatch)
    with pytest.raises(ValueError, match=r"logger\.mode=online: W&B cannot start") as caught:
        record_run(Path("run"), [WandbSink("p", mode="online")])
    assert os.environ["WANDB_API_KEY"] not in str(caught.value)
    assert read_run(Path("run")).status == "refused"
