"""The README's table of results: made by the commands beside it, and laid out as they lay it out today."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from spec_lab.cli.compose import compose_run
from spec_lab.report.__main__ import main as report
from tests.fake_runs import record_run

README = Path(__file__).parents[1] / "README.md"
FIGURE = re.compile(r"\d[\d,]*(\.\d+)?")


def results() -> str:
    """What stands between the markers."""
    found = re.search(r"<!-- results -->\n(.*?)<!-- end of results -->", README.read_text(), flags=re.DOTALL)
    assert found is not None, "the README has lost its table of results, or a marker of it"
    return found[1]


def table_and_text(text: str) -> tuple[list[list[str]], str]:
    """The cells of the table, line by line, and what stands below it."""
    lines = text.strip().splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    last = max(index for index, line in enumerate(lines) if line.startswith("|"))
    return [[cell.strip() for cell in row] for row in rows], "\n".join(lines[last + 1 :]).strip()


def shape(text: str) -> str:
    """The text with zeros for every figure, as many behind the point as it has."""
    return FIGURE.sub(lambda figure: "0" + re.sub(r"\d", "0", figure[1] or ""), text)


@pytest.fixture
def printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the report prints today of a run."""
    record_run(tmp_path / "run")
    assert report([str(tmp_path), "--markdown"]) == 0
    return capsys.readouterr().out


def test_the_table_is_laid_out_as_the_report_does_it(printed: str) -> None:
    theirs, below = table_and_text(printed)
    ours, our_text = table_and_text(results())
    assert ours[:2] == theirs[:2]
    assert {len(row) for row in ours} == {len(theirs[0])}
    numbers = slice(theirs[1].index("---:"), None)
    absent = {"-"}
    for row in ours[2:]:
        for cell, theirs_now in zip(row[numbers], theirs[2][numbers], strict=True):
            assert cell in absent or shape(cell) == shape(theirs_now), (row, theirs[2])
    (note, origin), (our_note, our_origin) = (text.split("\n\n") for text in (below, our_text))
    assert our_note == note
    layout = r"Target .+, \d+ prompts, batch .+, \d+ repeats; .+, threads .+; torch .+, revision .+; \d{4}-\d\d-\d\d\."
    for text in (origin, our_origin):
        assert re.fullmatch(layout, " ".join(text.split()))


def test_the_commands_beside_the_table_make_its_lines() -> None:
    lines = results().replace("\\\n", "")
    run, show = re.findall(r"^python -m (spec_lab\S*) (.+)$", lines, flags=re.MULTILINE)
    assert run[0] == "spec_lab" and show[0] == "spec_lab.report" and show[1].endswith(" --markdown")
    overrides = [word for word in shlex.split(run[1]) if word != "-m"]
    [drafters] = [word.partition("=")[2].split(",") for word in overrides if word.startswith("drafter=")]
    config, choices = compose_run([word for word in overrides if not word.startswith("drafter=")])
    rows = table_and_text(results())[0][2:]
    assert [row[0] for row in rows] == drafters
    assert {row[1] for row in rows} == {choices["prune"]}
    assert {row[3] for row in rows} == {str(config.drafter.num_draft_tokens)}
    assert f"{config.workload.limit} prompts, batch {config.batch_size}, {config.repeats} repeats" in results()


def test_no_folder_of_a_run_is_named_by_its_hash() -> None:
    """It holds the revision, so that whoever types the commands gets another one."""
    assert re.findall(r"outputs/\S*-[0-9a-f]{8}\b", README.read_text()) == []


def test_a_report_without_a_finished_run_has_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_run(tmp_path / "run")
    path = tmp_path / "run" / "summary.json"
    path.write_text(path.read_text().replace('"status": "finished"', '"status": "failed"'))
    assert report([str(tmp_path), "--markdown"]) == 2
    assert "--markdown shows finished runs, and there is none" in capsys.readouterr().err
