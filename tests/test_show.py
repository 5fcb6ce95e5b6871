"""One request, round by round: on a terminal, without colours, as HTML; of new, old and broken records."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from spec_lab.show import request_html
from spec_lab.show.__main__ import main
from spec_lab.show.rounds import load_request
from spec_lab.show.terminal import format_request, wants_colour
from tests.fake_runs import record_run
from tests.test_record_versions import WRITERS

ROOT = Path(__file__).parents[1]
TEXT = 'To <b>"be"</b>\x1b[31m or\n\u00e9'
PIECES = ["To", " <b>", '"be"', "</b>", "\x1b[31m or", "\n", "", "\u00e9"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose request r0 has every origin, a text that a terminal or a page would obey, and a split character."""
    record_run(tmp_path / "run")
    path = tmp_path / "run" / "requests.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    ends = [len("".join(PIECES[: index + 1])) for index in range(len(PIECES))]
    rows[0] |= {
        "output_ids": list(range(10, 18)), "text": TEXT, "text_ends": ends, "token_origins": "paraabca"[:8],
        "accepted_per_round": [3, 1, 2], "judged_per_round": [4, 2, 3], "emitted_per_round": [4, 2, 1],
        "offered_per_round": [3, 2, 3],
    }  # fmt: skip
    rows[0]["token_origins"] = "parabaca"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "run"


def test_a_request_is_cut_into_its_rounds(run: Path) -> None:
    request = load_request(run, "r0")
    assert "".join(token.text or "" for token in request.tokens) == TEXT
    assert [len(part.tokens) for part in request.rounds] == [1, 4, 2, 1]
    described = [request.describe_round(part) for part in request.rounds]
    assert described == ["prompt pass", "round 1: 3 of 3", "round 2: 1 of 2", "round 3: 2 of 3, cut"]


def test_marks_stand_where_there_is_no_colour(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "r0"]) == 0
    text = capsys.readouterr().out
    assert '  +[ <b>]~["be"]+[</b>]*[\\x1b[31m or]' in text
    assert "  +[\\n]![<16>]" in text
    assert "+[accepted] 4  ~[relaxed] 1  ![corrected] 1  *[bonus] 1" in text
    assert "\x1b" not in text


def test_colours_take_the_place_of_marks(run: Path) -> None:
    text = format_request(load_request(run, "r0"), colour=True)
    codes = re.findall("\x1b\\[([0-9;]*)m", text)
    assert {"30;42", "30;43", "97;41", "30;46", "30;47", "0"} == set(codes)
    assert "\x1b[31m" not in text, "the recorded text says nothing to the terminal"
    plain = re.sub("\x1b\\[[0-9;]*m", "", text)
    assert "To" in plain and "relaxed 1" in " ".join(plain.split())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_colours_are_for_terminals_that_want_them(environment: dict[str, str], expected: bool) -> None:
    assert wants_colour(Terminal(), environment) is expected
    assert not wants_colour(io.StringIO(), environment)


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_escapes_what_was_recorded(run: Path) -> None:
    reader = Reader()
    reader.feed(request_html(run, "r0"))
    assert reader.tags == {"div", "p", "span", "table", "tr", "td"}
    assert "<b>" in reader.text and "round 3: 2 of 3, cut" in reader.text
    assert request_html(str(run), "r0").count("background:#ffe08a") == 2, "the relaxed token and its legend"


def test_a_page_is_written(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.html"
    assert main([str(run), "r0", "--html", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert "\u00e9" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("version", [version for version in WRITERS if version < 4])
def test_old_runs_say_unknown_and_show_ids_and_text(
    version: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    WRITERS[version](tmp_path)
    assert main([str(tmp_path), "r0"]) == 0
    text = capsys.readouterr().out
    assert "?[unknown] 24" in text and "text of r0" in text
    first = load_request(tmp_path, "r0").row["output_ids"][0]
    assert f"?[<{first}>]" in text
    assert "text of r0" in request_html(tmp_path, "r0")


@pytest.mark.parametrize("width", ["20", "80"])
def test_lines_fit_the_terminal(
    width: str, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    assert main([str(run), "r1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if line.startswith("  ")) <= int(width)


def test_without_an_id_the_requests_are_listed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 12 and lines[2].split()[:4] == ["r0", "code", "8", "3"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["RUN", "r99"], "no request 'r99'; it has 12, such as"),
        (["nowhere", "r0"], "nowhere/summary.json"),
        (["RUN", "--html", "x.html"], "--html shows one request"),
        (["RUN", "r0", "--html", "no/folder/x.html"], "--html=no/folder/x.html cannot be written"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_a_line(
    arguments: list[str], reason: str, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    assert main([str(run) if text == "RUN" else text for text in arguments]) == 2
    output = capsys.readouterr()
    assert reason in output.err and output.err.count("\n") == 1 and output.out == ""


@pytest.mark.parametrize("change", [{"token_origins": "z" * 8}, {"text_ends": [1]}, {"emitted_per_round": [1]}])
def test_a_broken_request_is_a_line(change: dict[str, Any], run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "requests.jsonl"
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(first) | change), *others]) + "\n")
    assert main([str(run), "r0"]) == 2
    error = capsys.readouterr().err
    assert str(path) in error and error.count("\n") == 1


@pytest.mark.parametrize("arguments", [["spec_lab.show", "RUN"], ["spec_lab.show", "RUN", "r0"]])
def test_it_ends_quietly_when_nobody_reads_on(arguments: list[str], run: Path) -> None:
    command = [sys.executable, "-m", *(str(run) if text == "RUN" else text for text in arguments)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
