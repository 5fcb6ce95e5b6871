"""The extension in docs/extend.md, as a user writes it: found, run, swept, helped with, examined and re-scored."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spec_lab.__main__ import main
from spec_lab.app.compose import compose
from spec_lab.checkpoints.packaged import ZOO
from spec_lab.config import option
from spec_lab.doctor.__main__ import main as examine
from spec_lab.record.metric import METRICS
from spec_lab.record.models import Run
from spec_lab.record.reading import read_requests, read_run

PAGE = Path(__file__).parents[1] / "docs" / "extend.md"
BLOCK = re.compile(r"^`(my_lab/\S+)`\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
LAB = "extensions=[my_lab]"
CHEAP = [
    *("max_new_tokens=8", "repeats=1", "warmup_requests=0", "profile_rounds=0", "kernels=torch", "device=cpu"),
    *("references=[plain]", "workload.limit=2", "batch_size=2"),
]
MENU = {
    "drafter": ("copycat", "first_layers"),
    "acceptance": ("near",),
    "graph": ("padded",),
    "attention": ("plain_math",),
    "target": ("newest",),
    "workload": ("count_down",),
    "logger": ("csv",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the page. Those that it shows once are written for each option."""
    folder = tmp_path_factory.mktemp("extension")
    files = dict(BLOCK.findall(PAGE.read_text()))
    shown = files["my_lab/conf/drafter/copycat.yaml"]
    for group, names in MENU.items():
        for name in names:
            other = shown.replace("drafter/copycat", f"{group}/{name}").replace("drafter=copycat", f"{group}={name}")
            files[f"my_lab/conf/{group}/{name}.yaml"] = other
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(autouse=True)
def importable(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Importable by this test alone, whose working directory is empty."""
    registered = {group: dict(classes) for group, classes in option._options.items()}
    monkeypatch.setattr(option, "_options", registered)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(tmp_path)
    yield
    METRICS.pop("metrics.all_kept", None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_lab"]:
        del sys.modules[name]


def run(*overrides: str) -> tuple[Run, Path]:
    """Run with the extension; return the record."""
    assert main([LAB, *CHEAP, "hydra.run.dir=X", *overrides]) == 0
    return read_run(Path("X")), Path("X")


def outputs(*overrides: str) -> list[list[int]]:
    _, place = run(*overrides)
    return [row.output_ids for row in read_requests(place)]


@pytest.mark.parametrize(
    ("drafter", "graphs"), [("copycat", ["full_loop", "step_replay", "split_seed"]), ("first_layers", ["round"])]
)
def test_a_drafter_leaves_plain_decodings_output(drafter: str, graphs: list[str]) -> None:
    """In graphs too. It is counted by the metric, and the logger writes its file."""
    expected = outputs("drafter=none")
    for graph in graphs:
        assert outputs(f"drafter={drafter}", f"graph={graph}", "prune=catchup") == expected
    summary, place = run(f"drafter={drafter}", "logger=csv", "logger.file=mine.csv")
    assert summary["divergence.bugs"] == 0
    assert summary.choices["drafter"] == drafter and 0 <= summary["metrics.all_kept"] <= 2
    assert [line.split(",")[1] for line in (place / "mine.csv").read_text().splitlines()] == ["8", "8"]
    assert list(summary.machine.extensions) == ["my_lab"]


def test_a_rule_accepts_near_misses() -> None:
    strict, near = (run(word, "max_new_tokens=40")[0] for word in ("acceptance=strict", "acceptance=near"))
    assert near.acceptance_lossless is False
    assert strict["acceptance_length"] < near["acceptance_length"]


@pytest.mark.parametrize(
    "overrides", ["prune.catchup=large_batches batch_size=4 workload.limit=4", "graph=padded", "attention=plain_math"]
)
def test_a_pruner_a_graph_mode_and_a_backend_leave_the_output(overrides: str) -> None:
    words = overrides.split()
    assert outputs(*words) == outputs(*(word for word in words if "=large" not in word and word[0] not in "ga"))


def test_a_target_a_workload_and_a_checker() -> None:
    for number in (1, 2):
        Path(f"steps/{number}").mkdir(parents=True)
        for file in (ZOO / "pocket").iterdir():
            (Path(f"steps/{number}") / file.name).symlink_to(file)
    words = ["target=newest", "target.path=steps", "workload=count_down", "drafter=copycat"]
    assert compose([LAB, *words]).config.target.folder == Path("steps/2")
    rows = read_requests(run(*words)[1])
    assert [(row.id, row.checker) for row in rows] == [("from-3", "last_word"), ("from-4", "last_word")]


def test_a_sweep_help_and_the_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", LAB, *CHEAP, "drafter=copycat,ngram", "drafter.num_draft_tokens=1,2"]) == 0
    found = [read_run(file.parent).choices["drafter"] for file in Path("outputs").rglob("summary.json")]
    assert sorted(found) == ["copycat", "copycat", "ngram", "ngram"]
    assert main([LAB, "--help", "drafter"]) == 0
    printed = capsys.readouterr().out
    assert "copycat              Repeats the last token." in printed and "drafter.offset" in printed
    assert examine([LAB, "drafter=copycat", *CHEAP]) == 0
    assert "drafter=copycat has no weights" in capsys.readouterr().out


def test_an_installed_package_is_found_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"  # a new folder: what Python has read of another one may be remembered
    installed = site / "my_lab-0.3.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my_lab\nVersion: 0.3\n")
    (installed / "entry_points.txt").write_text("[spec_lab.extensions]\nmy_lab = my_lab\n")
    monkeypatch.syspath_prepend(str(site))
    assert compose(["drafter=copycat", "drafter.offset=2"]).choices["drafter"] == "copycat+offset=2"
