"""`python -m spec_lab.report FOLDER --html FILE`: one page, whole in itself, that a browser opens and sorts."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from spec_lab.app.compose import compose
from spec_lab.record.runs import Run, find_runs
from spec_lab.report.__main__ import main
from spec_lab.report.command import command_of
from spec_lab.report.comparable import numbered
from spec_lab.report.figure_data import figure_data
from spec_lab.report.overview_plot import lengths_and_differences
from spec_lab.report.paired_table import compare
from tests.fake_runs import make_info, make_summary, record_run

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER_SECONDS = 60
HARNESS = """<script>
const head = [...document.querySelectorAll("th")].find(one => one.textContent === "K");
const place = [...head.parentNode.children].indexOf(head);
const read = () => [...head.closest("table").tBodies[0].rows].map(row => row.cells[place].textContent).join(",");
const seen = [read()];
head.click(); seen.push(read());
head.click(); seen.push(read());
document.querySelector("details").open = true;
seen.push(document.querySelectorAll("figure svg").length > 0, document.querySelector("details table").offsetHeight > 0);
document.title = seen.join(" | ");
</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of three runs, of which one has a name that is no HTML."""
    folder = tmp_path_factory.mktemp("runs")
    for second, k in enumerate((3, 10, 9)):
        config = {"batch_size": k, "seed": 0, "drafter": {"name": "<b>own", "num_draft_tokens": k}}
        record_run(folder / str(k), info=make_info(config, f"2026-01-02T03:04:{second:02d}+00:00"))
    file = folder / "page.html"
    assert main([str(folder), "--html", str(file)]) == 0
    return file.read_text()


class Links(HTMLParser):
    """Collects all that a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [str(value) for name, value in attrs if name in ("src", "href", "xlink:href")]


def test_the_page_fetches_nothing(page: str) -> None:
    links = Links()
    links.feed(page)
    assert links.found and all(link.startswith("#") for link in links.found)
    assert "default-src 'none'" in page and "@import" not in page and "<b>own" not in page


def test_the_page_has_commands_definitions_and_machine(page: str) -> None:
    for heading in ("Runs", "Figures", "Commands", "Machine", "Definitions", "Acceptance by position"):
        assert re.search(rf"<h2[^>]*>{heading}</h2>", page), heading
    assert page.count("<figure>") == page.count("data of ") >= 4


def test_a_browser_opens_and_sorts_it(page: str, tmp_path: Path) -> None:
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser here ({', '.join(BROWSERS)}): the page was not opened; apt-get install chromium")
    file = tmp_path / "page.html"
    file.write_text(page.replace("</body>", f"{HARNESS}</body>"))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"--user-data-dir={tmp_path}"]
    done = subprocess.run([*command, file.as_uri()], capture_output=True, text=True, timeout=BROWSER_SECONDS)
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title is not None, done.stderr
    assert title[1] == "3,10,9 | 3,9,10 | 10,9,3 | true | true"


@pytest.mark.parametrize(
    "overrides",
    [
        ["drafter=ngram", "prune=catchup", "batch_size=4"],
        ["sampling=sampled", "acceptance=rejection", "acceptance.method=block", "drafter.draft_sampling=distribution"],
        ["acceptance=relaxed_thinking", "acceptance.topk=3", "references=[]", "workload.categories=[code,prose]"],
        ["workload=jsonl", "workload.path='a b.jsonl'", "prune.catchup=pre_attention"],
    ],
)
def test_the_command_composes_to_what_ran(overrides: list[str]) -> None:
    import shlex

    run_ = compose(overrides)
    config, choices = run_.config, run_.choices
    summary = make_summary(info=dataclasses.replace(make_info(dataclasses.asdict(config)), choices=choices))
    words = shlex.split(command_of(Run(Path(), summary)))
    assert words[:3] == ["python", "-m", "spec_lab"]
    again = compose(words[3:]).config
    assert dataclasses.replace(again, auto=config.auto) == config


def test_a_figures_numbers_can_be_read_back(tmp_path: Path) -> None:
    for k in (3, 4):
        config = {"batch_size": 1, "seed": k, "drafter": {"name": "eagle3", "num_draft_tokens": 3}}
        record_run(tmp_path / str(k), info=make_info(config))
    compared, _ = compare(numbered(find_runs([tmp_path])))
    header, body = figure_data(lengths_and_differences(compared))
    length = compared[0].length
    assert length is not None and length.low is not None
    line = dict(zip(header, body[0], strict=True))
    assert float(line["across"]) == pytest.approx(length.value, rel=1e-5)
    assert float(line["from"]) == pytest.approx(length.low, rel=1e-5) and line["up"].startswith("#1 eagle3")
