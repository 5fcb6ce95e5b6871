"""A number that no run can measure costs its run a line, wherever it stands in a record."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spec_lab.core.errors import UserError
from spec_lab.record.reading import read_request_rows, read_round_rows, read_summary
from spec_lab.report.__main__ import main as report
from tests.fake_runs import record_run

Place = tuple[str | int, ...]
ANYTHING = ("definitions", "choices", "versions")
MAY_BE_NEGATIVE = ({"config", "seed"}, {"divergence", "median_margin"}, {"divergence", "margin"})


def numbers(value: Any, place: Place = ()) -> Iterator[Place]:
    """Every number below `value`, of a list its last."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers(item, (*place, key))
    elif isinstance(value, list):
        if value:
            yield from numbers(value[-1], (*place, len(value) - 1))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield place


def changed(value: Any, place: Place, to: Any) -> Any:
    value = copy.deepcopy(value)
    inside = value
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = to
    return value


def assert_refused(path: Path, value: Any, place: Place, read: Callable[[Path], object]) -> None:
    path.write_text(json.dumps(value) + "\n")
    with pytest.raises(UserError) as caught:
        read(path.parent)
    keys = [key for key in place if isinstance(key, str)]
    assert str(path) in str(caught.value) and keys[-1] in str(caught.value), place


READERS = {"summary.json": read_summary, "requests.jsonl": read_request_rows, "rounds.jsonl": read_round_rows}


@pytest.mark.parametrize("name", READERS)
def test_no_number_may_be_negative_nor_of_another_type(name: str, tmp_path: Path) -> None:
    record_run(tmp_path)
    path = tmp_path / name
    value = json.loads(path.read_text().splitlines()[0] if name.endswith("l") else path.read_text())
    for one_is_enough in ("references", "by_category"):
        value[one_is_enough] = dict(list(value.get(one_is_enough, {}).items())[:1])
    places = [place for place in numbers(value) if place[0] not in ANYTHING]
    assert len(places) > 7
    for place in places:
        assert_refused(path, changed(value, place, "x"), place, READERS[name]) if place[-1] != "seed" else None
        if set(place) not in MAY_BE_NEGATIVE:
            assert_refused(path, changed(value, place, -3), place, READERS[name])


SHARES: tuple[Place, ...] = (
    ("accuracy", "value"),
    ("accuracy", "high"),
    ("references", "plain", "accuracy", "value"),
    ("by_category", "code", "accuracy", "low"),
    ("acceptance_rate_by_position", "unconditional", 0),
    ("references", "unpruned", "acceptance_rate_by_position", "conditional", 1),
    ("equal_to_plain",),
    ("gpu_idle_share",),
    ("accuracy_change", "difference"),
)
LENGTHS: tuple[Place, ...] = (
    ("acceptance_length",),
    ("acceptance_length_all",),
    ("by_category", "code", "acceptance_length"),
    ("references", "plain", "acceptance_length"),
)


@pytest.mark.parametrize(
    ("place", "to"),
    [*((place, 1.5) for place in SHARES), *((place, 4.5) for place in LENGTHS), *((place, 0.5) for place in LENGTHS)],
)
def test_a_share_is_at_most_1_and_a_length_between_1_and_all_drafts(place: Place, to: float, tmp_path: Path) -> None:
    summary = record_run(tmp_path)
    assert_refused(tmp_path / "summary.json", changed(summary, place, to), place, read_summary)


@pytest.mark.parametrize("change", [{"low": 9.0}, {"high": 0.01}, {"value": 99.0}])
@pytest.mark.parametrize("key", ["speedup", "pruning_speedup"])
def test_an_interval_holds_its_value(key: str, change: dict[str, float], tmp_path: Path) -> None:
    summary: dict[str, Any] = dict(record_run(tmp_path))
    assert_refused(tmp_path / "summary.json", summary | {key: summary[key] | change}, (key,), read_summary)


@pytest.mark.parametrize("name", ["summary.json", "rounds.jsonl"])
def test_an_extensions_metric_may_be_negative(name: str, tmp_path: Path) -> None:
    record_run(tmp_path)
    path = tmp_path / name
    value = json.loads(path.read_text().splitlines()[0] if name.endswith("l") else path.read_text())
    path.write_text(json.dumps(value | {"metrics": {"lead": -3.0, "low": 2.0, "high": 1.0}}) + "\n")
    READERS[name](path.parent)


def test_a_day_is_one(tmp_path: Path) -> None:
    assert_refused(
        tmp_path / "summary.json", record_run(tmp_path) | {"started_at": "soon"}, ("started_at",), read_summary
    )


def test_more_drafts_are_not_accepted_than_offered(tmp_path: Path) -> None:
    record_run(tmp_path)
    row = json.loads((tmp_path / "requests.jsonl").read_text().splitlines()[0])
    row["offered_per_round"] = [max(count - 1, 0) for count in row["accepted_per_round"]]
    assert_refused(tmp_path / "requests.jsonl", row, ("accepted_per_round",), read_request_rows)


def test_the_other_runs_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = record_run(tmp_path / "a")
    record_run(tmp_path / "b")
    (tmp_path / "a" / "summary.json").write_text(json.dumps(summary | {"acceptance_length": -3}))
    assert report([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    output = capsys.readouterr()
    assert "left out: " in output.err and "acceptance_length is -3" in output.err and output.err.count("\n") == 1
    assert "-3.00" not in output.out and str(tmp_path / "b") in output.out
