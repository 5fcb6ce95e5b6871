"""`python -m spec_lab.paper`: lengths as other tools count them, the list of runs, and what is printed of a row."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from spec_lab.core.errors import UserError
from spec_lab.paper import __main__ as paper
from spec_lab.paper.content import JSON_FILE, printed, read_tables
from spec_lab.paper.drafters import own_tensors
from spec_lab.paper.file import Line, read_paper
from spec_lab.paper.lengths import LENGTHS, aiperf, deepspec, specdec_bench, vllm
from spec_lab.paper.plan import cells_of, merged
from spec_lab.paper.printed import as_csv, as_latex, as_markdown, grid_of
from spec_lab.paper.provenance import COLUMNS, missing, provenance_of
from spec_lab.paper.table import TableColumn, TableRow, table_of
from spec_lab.record.row_schema import RequestRow
from tests import recorded_runner
from tests.fake_runs import make_summary

EXAMPLE = Path(__file__).parents[1] / "conf" / "paper" / "pocket.yaml"


def request(name: str, accepted: list[int], judged: list[int], emitted: list[int], end: str) -> RequestRow:
    """A made-up request, of which only its rounds are looked at."""
    rounds = {"accepted_per_round": accepted, "judged_per_round": judged, "emitted_per_round": emitted}
    return {"id": name, "finish_reason": end, **rounds}  # type: ignore[typeddict-item]


ROUNDS = [
    # The last round accepts 3 drafts, of which the first is an end of sequence.
    request("question-81", [3, 0, 3], [4, 1, 1], [4, 1, 1], "eos"),
    # The last round is judged whole, and the limit cuts all but one token of it off.
    request("question-81-turn2", [2, 3], [3, 4], [3, 1], "length"),
    # It ends in the prompt pass, so that no round is left.
    request("question-82", [], [], [], "eos"),
]


def test_specdec_bench_averages_chunks_of_turns() -> None:
    """Turns of chunks 1 4 1 (the end of sequence is a chunk of its own and falls), and 1 3 1; the third has none."""
    assert specdec_bench(ROUNDS) == pytest.approx(((1 + 4 + 1) / 3 + (1 + 3 + 1) / 3) / 2)


def test_vllm_pools_accepted_drafts() -> None:
    """Those behind the end of sequence count."""
    assert vllm(ROUNDS) == pytest.approx(1 + (3 + 0 + 3 + 2 + 3) / 5)


def test_modules_in_the_targets_checkpoint_are_counted_without_its_layers(tmp_path: Path) -> None:
    names = ("model.layers.0.mlp.up_proj.weight", "mtp.fc.weight")
    save_file({name: torch.zeros(2, 2) for name in names}, tmp_path / "model.safetensors")
    inside: Any = SimpleNamespace(drafter_folder=tmp_path, target_folder=tmp_path)
    apart: Any = SimpleNamespace(drafter_folder=tmp_path, target_folder=tmp_path / "target")
    assert [tensor.name for tensor in own_tensors(inside)] == ["mtp.fc.weight"]
    assert {tensor.name for tensor in own_tensors(apart)} == set(names)


def test_deepspec_counts_first_turns_up_to_the_end_of_sequence() -> None:
    assert deepspec(ROUNDS) == pytest.approx((4 + 1 + 1) / 3)


def test_aiperf_averages_requests() -> None:
    assert aiperf(ROUNDS) == pytest.approx(((1 + 6 / 3) + (1 + 5 / 2)) / 2)


def test_no_rounds_are_no_length() -> None:
    assert [length(ROUNDS[2:]) for length in LENGTHS.values()] == [None] * 4


def test_a_later_override_stands_in_for_an_earlier_one() -> None:
    assert merged(["a=1", "b=2"], ["+a=3"], ["c=4"]) == ("+a=3", "b=2", "c=4")


def test_the_example_lists_every_line_at_its_temperatures() -> None:
    cells = cells_of(read_paper(EXAMPLE), ["seed=7"])
    heats = {cell.line: {c.temperature for c in cells if c.line == cell.line} for cell in cells}
    assert heats["EAGLE-3"] == {0.0, 1.0} and heats["EAGLE-3, relaxed"] == {0.0}
    assert {cell.part for cell in cells} == {"acceptance", "ablation", "speed"}
    assert all("seed=7" in cell.overrides for cell in cells)
    sampled = next(cell for cell in cells if cell.line == "n-gram" and cell.temperature == 1)
    assert "acceptance.method=one_hot" in sampled.overrides
    assert "drafter.draft_sampling=distribution" not in sampled.overrides


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_overrides_of_a_temperature_stand_over_those_of_the_line_and_those_of_an_ablation_over_both(
    temperature: float,
) -> None:
    at = {"greedy": ("prune=none",), "sampled": ("prune=none",)}
    line, ablation = Line("a", ("drafter=eagle3", "prune=catchup"), **at), Line("b", ("prune=post_attention",))
    changes: dict[str, Any] = {"base": "a", "lines": (line,), "ablations": (ablation,), "temperatures": (temperature,)}
    cells = cells_of(dataclasses.replace(read_paper(EXAMPLE), speed=None, **changes))
    prunings = {(cell.line, text) for cell in cells for text in cell.overrides if text.startswith("prune=")}
    assert prunings == {("a", "prune=none"), ("b", "prune=post_attention")}


@pytest.mark.parametrize(
    "typed",
    [
        "drafter=ngram",
        "prune=none",
        "sampling.temperature=0",
        "workload.categories=[code]",
        "batch_size=2",
        "+drafter=none",
    ],
)
def test_what_tells_runs_apart_is_not_typed_for_all(typed: str) -> None:
    with pytest.raises(UserError, match="change it in the file"):
        cells_of(read_paper(EXAMPLE), [typed])


def test_a_paper_of_more_runs_than_anyone_waits_for_is_refused() -> None:
    paper = dataclasses.replace(read_paper(EXAMPLE), temperatures=tuple(n / 1000 for n in range(1000)))
    with pytest.raises(UserError, match=r"has \d+ runs, and the most is 1000"):
        cells_of(paper)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"taks": {}}, "did you mean tasks"),
        ({"base": "EAGLE"}, "did you mean EAGLE-3"),
        ({"base": "zz"}, "no line zz; there are .*EAGLE-3"),
        ({"lines": {"x": "drafter=eagle3"}}, "lines.x must be a list"),
        ({"tasks": {}}, "tasks must have at least one"),
        ({"name": "../x"}, r"name='\.\./x' is part of a folder's name"),
        ({"speed": {"batch_sizes": [0], "draft_tokens": [1]}}, "speed.batch_sizes"),
        ({"speed": {"batch_sizes": [1], "draft_tokens": [1], "lines": "EAGLE-3"}}, "speed.lines must be a list"),
        ({"speed": {"batch_sizes": [1], "draft_tokens": [1], "lines": []}}, "speed.lines must be a list"),
        ({"temperatures": []}, "temperatures must hold numbers"),
        ({"temperatures": [float("inf")]}, "temperatures must hold numbers"),
        ({"temperatures": [1]}, "relaxed.temperatures: 0 is not one of the paper's"),
        ({"minutes": [1, 2]}, "minutes must be one"),
        ({"ablations": {"nothing": []}}, "ablations.nothing changes nothing"),
        ({"ablations": {"EAGLE-3": ["prune=none"]}}, "EAGLE-3 is the name of two lines or ablations"),
        ({"ablations": {"x": ["prune=none"], "x ": ["prune=prefill"]}}, "x is the name of two"),
        ({"sampled": ["sampling.temperature=0.5"]}, "sampled: sampling.temperature=0.5 belongs to temperatures"),
        ({"lines": {"a": ["sampling=sampled"]}}, "lines.a: sampling=sampled belongs to temperatures; leave it out"),
        ({"size": "full"}, "no key size; there are name, "),
        (
            {"speed": {"batch_sizes": [1], "draft_tokens": [1], "always": ["+batch_size=2"]}},
            "batch_size=2 belongs to speed.batch_sizes",
        ),
        ({"tasks": {"mean": []}}, "tasks.mean has the name of another row"),
        ({"tasks": {"a": [], "a: dates": []}}, "tasks.a: dates has the name of another row"),
        ({"tasks": {"a\nb": []}}, "tasks must map printable names"),
    ],
)
def test_a_broken_file_is_refused_in_a_line(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(EXAMPLE.read_text()), **change}))
    with pytest.raises(UserError, match=reason) as caught:
        read_paper(file)
    assert "\n" not in str(caught.value)


def of_what(**changes: str | None) -> dict[str, str | None]:
    return {**dict.fromkeys(COLUMNS, "none"), **changes}


def make_rows() -> list[TableRow]:
    values = {"line": "a & b", "length": 2.5, "length_low": 2.0, "length_high": 3.0}
    return [
        TableRow({**values, "task": "code"}, of_what()),
        TableRow({**values, "task": "prose", "length": 1.25, "length_low": None}, of_what()),
        TableRow({**values, "line": "c", "task": "code"}, of_what(prune="catchup")),
        TableRow({**values, "line": "lacking", "task": "code"}, of_what(template=None)),
    ]


LENGTH_COLUMNS = [
    TableColumn("line", "line"),
    TableColumn("task", "task"),
    TableColumn("length", "length", 2, interval=True),
]


def test_a_row_that_lacks_what_it_is_of_is_not_printed() -> None:
    table = table_of("t", "T", LENGTH_COLUMNS, ("line", "task"), make_rows(), across="task", shown="length")
    assert table.left_out == ["lacking, code: the record lacks template"]
    for text in (as_latex(table), as_markdown(table), as_csv(table)):
        assert "lacking" not in text


def test_tasks_stand_beside_each_other_and_what_differs_in_front() -> None:
    table = table_of("t", "T", LENGTH_COLUMNS, ("line", "task"), make_rows(), across="task", shown="length")
    grid = grid_of(table)
    assert list(grid.header) == ["line", "prune", "code", "prose"]
    assert [list(line) for line in grid.lines] == [
        ["a & b", "none", "2.50 (2.00 to 3.00)", "1.25"],
        ["c", "catchup", "2.50 (2.00 to 3.00)", "-"],
    ]
    assert r"a \& b & none & 2.50" in as_latex(table)
    [first, *_] = csv.DictReader(io.StringIO(as_csv(table)))
    assert first["length_low"] == "2.0" and first["prune"] == "none" and first["revision"] == "none"


def test_two_rows_of_one_name_are_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError, match="same name"):
        table_of("t", "T", LENGTH_COLUMNS, ("line", "task"), [*make_rows(), make_rows()[0]])


def test_without_acceptance_runs_no_tool_counts_lengths(tmp_path: Path) -> None:
    """As if only runs of the frontier had finished."""
    (tmp_path / JSON_FILE).write_text('{"tables": []}')
    with pytest.raises(UserError, match="--as vllm: no run over the paper's tasks has finished"):
        printed(tmp_path / JSON_FILE, "latex", "vllm")


def test_an_old_record_lacks_columns() -> None:
    """It is of before templates were recorded, and of a configuration that says little."""
    summary = make_summary()
    summary["template"] = None
    assert set(missing(provenance_of(summary))) >= {"template", "sampler", "limits"}


def test_a_paper_runs_once_and_prints_from_its_json(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "spec_lab.measure.runner", recorded_runner.stand_in())
    monkeypatch.syspath_prepend(".")
    Path("of_a_paper.py").write_text("def register(registry):\n    pass\n")
    small = {
        "always": ["extensions=[of_a_paper]"],  # each of the runs names it
        "lines": {"A": ["drafter=eagle3"], "B": ["drafter=ngram"]},
        "tasks": {"t": ["workload.limit=1"]},
        "speed": {"batch_sizes": [1], "draft_tokens": [1, 3], "lines": ["A"]},
    }
    Path("small.yaml").write_text(yaml.safe_dump(small))
    assert paper.main(["small.yaml", "--plan"]) == 0
    assert capsys.readouterr().out.startswith("4 runs: the time is unknown")
    assert paper.main(["small.yaml"]) == 0
    first = capsys.readouterr().out
    assert first.startswith(r"\begin{table}") and r"\toprule" in first and first.count(r"\begin{table}") >= 5
    [file] = Path("outputs").glob(f"*/paper/{JSON_FILE}")
    tables = read_tables(file)
    assert {row.values["line"] for row in tables["frontier"].rows} == {"A", "plain decoding"}
    assert [row.values["best"] for row in tables["frontier"].rows].count("yes") == 1
    assert json.loads(file.read_text())["command"] == "python -m spec_lab.paper small.yaml"
    assert paper.main(["small.yaml", "--as", "vllm", "--format", "markdown"]) == 0
    again = capsys.readouterr()
    assert again.err.count("finished before") == 4 and "as vllm counts it" in again.out
    assert paper.main(["small.yaml", "--plan"]) == 0
    assert capsys.readouterr().out.startswith("4 runs, 0 of them left")


@pytest.mark.parametrize("typed", ["batch_size=8", "drafter.num_draft_tokens=5", "sampling.temperature=0.5"])
def test_a_number_that_a_table_shows_is_not_typed_behind_the_file(tmp_path: Path, typed: str) -> None:
    """Else the row of a paper with one batch size and one K would have other numbers than its run."""
    file = tmp_path / "x.yaml"
    speed = {"batch_sizes": 1, "draft_tokens": 3}
    file.write_text(yaml.safe_dump({"lines": {"a": ["drafter=ngram"]}, "tasks": {"t": []}, "speed": speed}))
    with pytest.raises(UserError, match=f"^{typed}: .* belongs to (speed.|temperatures of )"):
        cells_of(read_paper(file), [typed])
