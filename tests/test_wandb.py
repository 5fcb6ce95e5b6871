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
from spec_lab.app.compose import compose
from spec_lab.core.errors import UserError
from spec_lab.menu.refusals.run import refusals
from spec_lab.record.reading import read_summary
from spec_lab.record.recorder import Recorder
from spec_lab.record.scalars import scalars
from spec_lab.record.schema import Summary
from spec_lab.record.wandb_content import NOT_RESULTS, without_user_paths
from spec_lab.record.wandb_settings import has_key
from spec_lab.record.wandb_sink import WandbSink
from tests.fake_runs import make_info, record_run

HOST = "the-host-of-somebody"
ARGUMENT = "--an-argument-of-somebody"
BLOCK = 32768
HEADER = 7
DISTINCT_CONFIG = {"batch_size": 1, "drafter": {"num_draft_tokens": 3}, "target": {"path": "checkpoints/tiny"}}


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


def draw_a_dot(summary: Summary, folder: Path) -> list[tuple[Path, str | None]]:
    """Stands in for the plots of a run, which take longer to draw than all else here."""
    folder.mkdir(parents=True)
    Image.new("RGB", (2, 2)).save(folder / "dot.png")
    return [(folder / "dot.png", None), (folder / "other.png", "plot not drawn: no axis can show it")]


@pytest.fixture
def recorded(workplace: Path) -> tuple[Path, Summary]:
    folder = workplace / "outputs" / "run"
    sink = WandbSink("a_project", group="a_sweep", draw=draw_a_dot)
    return folder, record_run(Path("outputs/run"), [sink], make_info(DISTINCT_CONFIG))


def test_offline_run_says_the_same_as_the_files(recorded: tuple[Path, Summary]) -> None:
    folder, summary = recorded
    records = read_offline(folder)

    found = merged(item for record in records for item in record.summary.update)
    results = {key: value for key, value in summary.items() if key not in NOT_RESULTS}
    assert {key: found[key] for key in results} == results
    assert {key: found[key] for key in scalars(summary)} == scalars(summary), "where W&B's sweeps look for a metric"
    media = {"requests": "table-file", "kernel_times": "table-file", "figures/dot": "image-file"}
    assert {key: found[key]["_type"] for key in media} == media
    own = {key for key in found if not key.startswith("_")}
    assert own == {*results, *scalars(summary), *media}, "W&B adds last values where nothing says how to summarise"

    [run] = [record.run for record in records if record.HasField("run")]
    config = merged(run.config.update)
    assert {key: config[key] for key in DISTINCT_CONFIG} == DISTINCT_CONFIG
    assert config["origin"]["git_revision"] == summary["git_revision"]
    assert config["origin"]["extensions"] == {}
    assert config["origin"]["versions"] == summary["versions"]
    assert config["origin"]["choices"] == summary["choices"]
    assert run.host == "not recorded"
    assert (run.project, run.run_group, run.job_type) == ("a_project", "a_sweep", "bench")
    assert run.display_name == "run eagle3 catchup"
    of_no_group = {"drafter.num_draft_tokens=3", "batch_size=1"}
    assert set(run.tags) == {f"{group}={name}" for group, name in summary["choices"].items()} | of_no_group
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]


def test_offline_run_has_step_metrics(recorded: tuple[Path, Summary]) -> None:
    folder, summary = recorded
    records = read_offline(folder)
    steps = {record.metric.glob_name: record.metric.step_metric for record in records if record.HasField("metric")}
    assert steps["request/*"] == "request/index"
    assert steps["repeat/*"] == "repeat/index"
    history = [merged(record.history.item) for record in records if record.HasField("history")]
    assert [row["request/index"] for row in history if "request/index" in row] == [8, 12]
    assert [row["request/emitted_tokens"] for row in history if "request/index" in row][-1] == summary["emitted_tokens"]
    rates = [row["repeat/decode_tokens_per_second"] for row in history if "repeat/index" in row]
    assert rates == pytest.approx([repeat["decode_tokens_per_second"] for repeat in summary["repeats"]])


def test_offline_run_has_the_table_and_the_files(recorded: tuple[Path, Summary]) -> None:
    folder, summary = recorded
    [table_path] = folder.glob("wandb/offline-run-*/files/media/table/requests*.json")
    table = json.loads(table_path.read_text())
    assert len(table["data"]) == summary["num_requests"]
    rows = [dict(zip(table["columns"], cells, strict=True)) for cells in table["data"]]
    pooled = sum(row["acceptance_length_all"] * row["rounds"] for row in rows) / sum(row["rounds"] for row in rows)
    assert pooled == pytest.approx(summary["acceptance_length_all"]) != summary["acceptance_length"]
    first = rows[1]
    assert (first["id"], first["category"], first["divergence"]) == ("r1", "dates", "near_tie")
    assert first["text"] == "text of r1"
    assert first["acceptance_imposed"] is False

    [kernels_path] = folder.glob("wandb/offline-run-*/files/media/table/kernel_times*.json")
    kernels = json.loads(kernels_path.read_text())
    assert [dict(zip(kernels["columns"], row, strict=True)) for row in kernels["data"]] == summary["kernels"]
    [artifact] = [record.artifact for record in read_offline(folder) if record.HasField("artifact")]
    entries = {entry.path: entry.local_path for entry in artifact.manifest.contents}
    assert set(entries) == {"config.yaml", "environment.json", "requests.jsonl", "rounds.jsonl", "summary.json"}
    assert not any(Path(local_path).is_absolute() for local_path in entries.values())
    environment = json.loads((Path.cwd() / entries.pop("environment.json")).read_text())
    assert (environment["versions"], environment["device"]) == (summary["versions"], summary["device"])
    for name, local_path in entries.items():
        assert (Path.cwd() / local_path).read_bytes() == (folder / name).read_bytes()


def test_nothing_tells_who_and_where(recorded: tuple[Path, Summary], workplace: Path) -> None:
    folder, _ = recorded
    wandb.teardown()
    files = [path for path in (folder / "wandb").rglob("*") if path.is_file() or path.is_symlink()]
    assert len(files) >= 6
    for path in files:
        assert not path.is_symlink(), "a link names a path"
        content = path.read_bytes()
        for private in (
            *private_names(),
            str(workplace),
            str(workplace.parent),
            ARGUMENT,
            "somebody",
            sys.executable,
            __file__,
        ):
            assert private.encode() not in content, (private, path)


def test_a_users_path_is_cut_to_its_last_part(workplace: Path) -> None:
    """Also where the run's folder is not below the working directory."""
    secret = workplace.parent / "models" / "my-llama"
    folder = workplace.parents[2] / "elsewhere"
    record_run(folder, [WandbSink("p")], make_info({"target": {"path": str(secret)}}))

    assert read_summary(folder)["config"]["target"]["path"] == str(secret)
    records = read_offline(folder)
    [run] = [record.run for record in records if record.HasField("run")]
    assert merged(run.config.update)["target"] == {"path": "my-llama"}
    [artifact] = [record.artifact for record in records if record.HasField("artifact")]
    for entry in artifact.manifest.contents:
        assert b"somebody" not in (folder / entry.local_path).read_bytes()
    for path in (folder / "wandb").rglob("*.*"):
        assert not path.is_file() or str(folder).encode() not in path.read_bytes()


def test_paths_inside_text_are_shortened(workplace: Path) -> None:
    reason = f"FileNotFoundError: {workplace}/a.json and {workplace.parent}/b.json"
    assert without_user_paths({"reason": reason}) == {"reason": "FileNotFoundError: ./a.json and ~/b.json"}
    assert without_user_paths([1, None, "eagle3", "a/b", "/x/y/z"]) == [1, None, "eagle3", "a/b", "z"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("OSError: cannot read /data/somebody/models/x.json", "OSError: cannot read x.json"),
        ("[Errno 2] No such file: '/data/somebody/x y/z.json'", "[Errno 2] No such file: 'z.json'"),
        ("open /a/b/c, then /d/e/f and more", "open c, then f and more"),
        ("see https://a.b/c/d", "see https://a.b/c/d"),
        ("12 tokens/s at 1/2, and / alone", "12 tokens/s at 1/2, and / alone"),
        ("models/llama/config.json", "models/llama/config.json"),
    ],
)
def test_any_absolute_path_inside_text_is_cut(text: str, expected: str, workplace: Path) -> None:
    assert without_user_paths({"reason": text}) == {"reason": expected}


KILLED_RUN = """
import os, sys
from pathlib import Path
from spec_lab.record.recorder import Recorder, request_row
from spec_lab.record.wandb_sink import WandbSink
from tests.fake_runs import MAIN, make_info, measure
with Recorder(Path(sys.argv[1]), make_info(), [WandbSink("p", mode="offline")]) as recorder:
    for record in measure(MAIN).requests:
        recorder.request(request_row(record, "text", None, None))
    os.kill(os.getpid(), 9)
"""


def test_a_killed_run_tells_nothing_either(workplace: Path) -> None:
    """W&B's logs name the folder as it was given, and one of them is a link into the user's home."""
    root = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": f"{root}:{root / 'kernels'}"}
    done = subprocess.run([sys.executable, "-c", KILLED_RUN, str(workplace / "run")], env=environment, check=False)
    assert done.returncode == -9
    files = [path for path in Path("run").rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert not any(path.is_symlink() or path.suffix == ".log" for path in Path("run").rglob("*"))
    for path in files:
        assert str(workplace).encode() not in path.read_bytes(), path
        assert b"somebody" not in path.read_bytes(), path


def test_what_cannot_be_drawn_costs_a_warning(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_run(Path("run"), [WandbSink("p", draw=draw_a_dot)])
    assert "warning: W&B: plot not drawn: no axis can show it" in capsys.readouterr().err
    found = merged(item for record in read_offline(workplace / "run") for item in record.summary.update)
    assert [key for key in found if key.startswith("figures/")] == ["figures/dot"]


def test_a_run_of_wandbs_own_agent_has_its_sweep_as_group(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SWEEP_ID", "a1b2c3")
    record_run(Path("run"), [WandbSink("p")])
    [run] = [record.run for record in read_offline(workplace / "run") if record.HasField("run")]
    assert run.run_group == "a1b2c3"


def test_every_run_of_a_multirun_carries_its_sweep_and_its_factors(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command line, with the real figures."""
    root = Path(__file__).parents[1]
    typed = "-m drafter=ngram logger=wandb logger.mode=offline name=a_study "
    typed += "debug=smoke workload.limit=1 max_new_tokens=4 kernels=torch references=[] profile_rounds=0"
    monkeypatch.setattr(sys, "argv", ["spec_lab", *typed.split(), ARGUMENT])
    assert main(typed.split()) == 0
    [sweep] = workplace.glob("outputs/a_study-sweep-*")
    folders = [path.parent for path in sweep.glob("*/summary.json")]
    runs = []
    for folder in folders:
        summary, records = read_summary(folder), read_offline(folder)
        found = merged(item for record in records for item in record.summary.update)
        assert found["acceptance_length"] == summary["acceptance_length"]
        figures = {key.removeprefix("figures/") for key in found if key.startswith("figures/")}
        assert figures == {"acceptance_by_position", "acceptance_by_category", "stage_times"}
        runs += [record.run for record in records if record.HasField("run")]
    assert {(run.run_group, run.job_type) for run in runs} == {(sweep.name, "bench")}
    assert all({"drafter=ngram", "acceptance=strict", "prune=none", "target=pocket"} <= set(run.tags) for run in runs)
    for path in sweep.glob("*/wandb/**/*"):
        for private in (*private_names(), str(workplace.parent), str(root), "somebody", ARGUMENT):
            assert path.is_dir() or private.encode() not in path.read_bytes(), (private, path)


def test_a_failed_run_ends_as_failed(workplace: Path) -> None:
    with pytest.raises(RuntimeError), Recorder(Path("run"), make_info(), [WandbSink("p")]):
        raise RuntimeError("out of memory")
    records = read_offline(workplace / "run")
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [1]
    assert merged(item for record in records for item in record.summary.update)["status"] == "failed"


def test_runs_of_one_process_stay_apart(workplace: Path) -> None:
    """Jobs of a multirun share a process."""
    for name in ("one", "two"):
        record_run(Path(name), [WandbSink("p")])
    runs = [record.run.run_id for name in ("one", "two") for record in read_offline(Path(name)) if record.run.run_id]
    assert len(set(runs)) == 2


def test_key_without_network_goes_offline_with_one_warning(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unreachable_server(monkeypatch)
    record_run(Path("run"), [WandbSink("p")])
    assert read_offline(workplace / "run")
    error = capsys.readouterr().err
    assert error.count("warning") == 1
    assert "logging offline" in error
    assert "cd " in error.splitlines()[-1]


def test_online_without_network_is_refused(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unreachable_server(monkeypatch)
    with pytest.raises(ValueError, match=r"use logger\.mode=auto or offline"):
        record_run(Path("run"), [WandbSink("p", mode="online")])
    assert read_summary(Path("run"))["status"] == "failed"


def logger_refusals(*overrides: str) -> list[str]:
    config = compose(["logger=wandb", *overrides]).config
    return refusals(config)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("logger.project=a/b", "logger.project=a/b is not the name of a W&B project"),
        ("logger.project='a?b'", "logger.project=a?b is not the name of a W&B project"),
        ("logger.project=''", "logger.project='' is not the name of a W&B project"),
        ("logger.project='a\nb'", r"logger.project='a\nb' is not the name of a W&B project"),
        (f"logger.project={'a' * 129}", "(at most 128 characters"),
        *((f"logger.group={text}", "is not the name of a W&B group") for text in ("''", "'a\nb'", "g" * 129)),
        ("logger.entity='a b'", "logger.entity=a b is not the name of a W&B user or team"),
        ("logger.entity=a/b", "logger.entity=a/b is not the name of a W&B user or team"),
        ("logger.entity=''", "logger.entity='' is not the name of a W&B user or team"),
        ("logger.mode=online", "logger.mode=online needs a key"),
    ],
)
def test_what_wandb_would_not_take_is_refused_before_anything_runs(
    override: str, message: str, workplace: Path
) -> None:
    [refused] = logger_refusals(override)
    assert message in refused
    assert refused.isprintable()
    assert "; use logger." in refused or "or use logger." in refused


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("WANDB_MODE", "garbage", "WANDB_MODE: Input should be 'online', 'offline'"),
        ("WANDB_MODE", "online", "WANDB_MODE=online needs a key"),
        ("WANDB_INIT_TIMEOUT", "soon", "WANDB_INIT_TIMEOUT: Input should be a valid number"),
        ("WANDB_BASE_URL", "nowhere", "WANDB_BASE_URL: Input should be a valid URL"),
        ("WANDB_PROJECT", "a/b", "Invalid project name 'a/b'"),
        ("WANDB_RUN_ID", "a/b", "Run ID cannot contain"),
    ],
)
def test_settings_that_wandb_cannot_read_are_refused(
    variable: str, value: str, message: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    [refused] = logger_refusals()
    assert message in refused
    assert refused.isprintable()
    config = compose(["logger=jsonl"]).config
    assert refusals(config) == [], "nobody asked W&B"


@pytest.mark.parametrize("key", ["sixchr", "a-short", "bad key " + "0" * 40])
def test_a_key_that_wandb_would_not_send_is_refused(key: str, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B says so itself, but only once everything has been decoded."""
    monkeypatch.setenv("WANDB_API_KEY", key)
    for mode in ("auto", "online"):
        [refused] = logger_refusals(f"logger.mode={mode}")
        assert refused.startswith("WANDB_API_KEY") and "use logger.mode=offline" in refused and key not in refused
    assert logger_refusals("logger.mode=offline") == logger_refusals("logger.mode=disabled") == []


def test_no_message_holds_a_key(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "a-secret-value"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    monkeypatch.setenv("WANDB_PROJECT", f"{secret}/")
    [refused] = logger_refusals()
    assert "Invalid project name" in refused
    assert secret not in refused
    monkeypatch.setenv("WANDB_PROJECT", "p")
    unreachable_server(monkeypatch)
    monkeypatch.setenv("WANDB_API_KEY", secret)
    with pytest.raises(UserError) as caught:
        record_run(Path("run"), [WandbSink("p", mode="online")])
    assert secret not in str(caught.value)
    assert secret.encode() not in (workplace / "run" / "summary.json").read_bytes()


def test_usual_names_pass(workplace: Path) -> None:
    assert logger_refusals("logger.project='my lab_1.2-b'", "logger.entity=my-team", "logger.mode=offline") == []


@pytest.mark.parametrize("key", ["project=p", "entity=e", "mode=online", "group=g"])
def test_nothing_of_wandb_is_taken_without_it(key: str) -> None:
    with pytest.raises(UserError, match=r"^logger\..* is not read by the chosen options"):
        compose(["logger=jsonl", f"logger.{key}"])


@pytest.mark.parametrize("mode", ["auto", "offline"])
def test_a_name_that_gets_through_ends_in_a_line(mode: str, workplace: Path) -> None:
    """As a sink is made by hand, nothing has refused the project before."""
    with pytest.raises(UserError, match=r"Invalid project name 'a/b'") as caught:
        record_run(Path("run"), [WandbSink("a/b", mode=mode)])
    assert str(caught.value).isprintable()
    assert read_summary(Path("run"))["status"] == "failed"


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"logger\.mode=onlin is not known; use one of auto, online"):
        WandbSink("p", mode="onlin")


def test_disabled_leaves_the_files_only(workplace: Path) -> None:
    record_run(Path("run"), [WandbSink("p", mode="disabled")])
    assert read_summary(Path("run"))["status"] == "finished"
    assert not list(Path("run").rglob("*.wandb"))


def test_environment_decides_in_auto_mode(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    record_run(Path("run"), [WandbSink("p")])
    assert not list(Path("run").rglob("*.wandb"))


def test_has_key(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_key()
    netrc = workplace.parent / ".netrc"
    netrc.write_text(f"machine api.wandb.ai login user password {'0' * 40}\n")
    netrc.chmod(0o600)
    assert has_key()
    netrc.unlink()
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    wandb.teardown()
    assert has_key()


def unreachable_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a key, and a server on a port where nothing listens."""
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("spec_lab.record.wandb_sink.INIT_TIMEOUT_SECONDS", 1)
    wandb.teardown()


@pytest.mark.parametrize(
    ("named", "of_a_sweep", "is_said"), [("other", "", True), ("p", "", False), ("other", "s1", False)]
)
def test_a_project_of_the_environment_is_said_to_be_unread(
    named: str,
    of_a_sweep: str,
    is_said: bool,
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", named)
    if of_a_sweep:
        monkeypatch.setenv("WANDB_SWEEP_ID", of_a_sweep)
    record_run(Path("run"), [WandbSink("p", mode="offline", draw=draw_a_dot)])
    assert ("WANDB_PROJECT=other is not read" in capsys.readouterr().err) == is_said
