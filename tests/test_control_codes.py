"""Text from outside is shown and never obeyed: by a terminal, a page, a document or a log, wherever it stands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import spec_lab
from spec_lab.app.notebook import Result
from spec_lab.build.workloads import check_requests
from spec_lab.checkpoints.families.table import read_model_config
from spec_lab.core.errors import UserError
from spec_lab.core.types import Request
from spec_lab.record.reading import read_summary
from spec_lab.report.__main__ import main as report
from spec_lab.show import request_html
from spec_lab.show.__main__ import main as show
from tests.fake_runs import record_run
from tests.test_study import SWEEP

POISONS = {
    "formula": "$_{$",
    "escape": "\x1b[2J",
    "c1": "\x9b31m",
    "bell": "\x07",
    "bidi": "\u202e",
    "line": "\r\v\u2028",
}
TOGETHER = {
    "formula": POISONS["formula"],
    "controls": POISONS["escape"] + POISONS["c1"] + POISONS["bell"],
    "lines": POISONS["bidi"] + POISONS["line"],
}
FREE_TEXTS = ("name", "reason", "verdict", "device_name", "cpu_model", "git_revision", "dtype", "weight_dtype")
"""The texts of a summary that are no word of a closed set and no key that tables look up."""


def poisoned(value: Any, poison: str) -> Any:
    """Every text below a free key, and every name of a category, with a poison at its end."""
    return {key: f"{text}{poison}" if isinstance(text, str) else text for key, text in value.items()}


@pytest.fixture(params=TOGETHER)
def runs(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A finished run, a failed one and a small study: every free text of their records has a poison."""
    poison = TOGETHER[request.param]
    record_run(tmp_path / "a")
    record_run(tmp_path / "b")
    for number, run in enumerate(SWEEP):
        run.record(tmp_path / str(number))
    for path in tmp_path.rglob("summary.json"):
        summary = json.loads(path.read_text())
        summary |= poisoned({key: summary[key] for key in FREE_TEXTS if key in summary}, poison)
        for key in ("choices", "versions", "definitions"):
            summary[key] = poisoned(summary[key], poison)
        summary["by_category"] = {f"{name}{poison}": outcome for name, outcome in summary["by_category"].items()}
        if path.parent.name == "b":
            summary |= {"status": "failed", "reason": f"broke{poison}"}
        path.write_text(json.dumps(summary))
    for path in tmp_path.rglob("requests.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row |= poisoned({key: row[key] for key in ("id", "category", "text", "finish_reason")}, poison)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def first_id(folder: Path) -> str:
    row: dict[str, str] = json.loads((folder / "requests.jsonl").read_text().splitlines()[0])
    return row["id"]


def printed(main: Callable[[list[str]], int], arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    main(arguments)
    output = capsys.readouterr()
    return output.out + output.err


def assert_harmless(text: str) -> None:
    assert len(text) > 20
    obeyed = sorted({letter for letter in text if letter != "\n" and not letter.isprintable()})
    assert not obeyed, [line for line in text.splitlines() if set(obeyed) & set(line)]


@pytest.mark.filterwarnings("error")
def test_nothing_that_is_printed_is_obeyed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs / "a"
    reported = printed(report, [str(runs)], capsys)
    assert_harmless(reported)
    assert "plot: " in reported and "plot not drawn" not in reported
    assert_harmless(printed(report, [*(str(runs / name) for name in "01"), "--markdown"], capsys))
    assert_harmless(printed(show, [str(run)], capsys))
    assert_harmless(printed(show, [str(run), first_id(run)], capsys))
    assert_harmless(printed(show, [str(run), f"none{first_id(run)}"], capsys))


def test_nothing_on_a_page_is_obeyed(runs: Path) -> None:
    result = Result(read_summary(runs / "a"), runs / "a")
    assert_harmless(str(result))
    assert_harmless(result._repr_html_())
    assert_harmless(request_html(runs / "a", first_id(runs / "a")))


def test_a_cell_of_a_document_stays_in_its_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = record_run(tmp_path)
    choices = summary["choices"] | {"drafter": "a|b\n|c"}
    (tmp_path / "summary.json").write_text(json.dumps(summary | {"choices": choices}))
    header, rule, line = printed(report, [str(tmp_path), "--markdown"], capsys).splitlines()[:3]
    bars = [part.replace("\\|", "").count("|") for part in (header, rule, line)]
    assert len(set(bars)) == 1


@pytest.mark.parametrize("names", [("a\x1b[2J", "c"), ("a", "c\x07")])
def test_a_request_whose_name_would_be_obeyed_is_refused(names: tuple[str, str]) -> None:
    folder = Path(spec_lab.__file__).parent / "zoo" / "pocket"
    with pytest.raises(UserError, match="printable"):
        check_requests([Request(*names, (1,), 4)], read_model_config(folder), folder)
