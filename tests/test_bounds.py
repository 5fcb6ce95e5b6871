"""The bounds of a knob: what they admit, how they read, and that the check finds every number of a configuration."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from spec_lab.menu.bounds import Bounds, bounds_of, out_of_bounds
from spec_lab.menu.config import knob
from spec_lab.program.options import run_menu


@dataclass
class Inner:
    rate: float = knob(0.5, "a share", least=0, most=1)
    rates: list[float] | None = knob(None, "shares", above=0)


@dataclass
class Outer:
    count: int = knob(1, "how many", least=1)
    limit: int | None = knob(None, "how many at most", least=1)
    scale: float = knob(1.0, "any number")
    switch: bool = knob(False, "no number", least=1)
    label: str = knob("", "no number either", least=1)
    inner: Inner = field(default_factory=Inner)
    optional: Inner | None = None


def test_defaults_are_within_their_bounds() -> None:
    assert out_of_bounds(Outer(optional=Inner())) == []


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (Outer(count=0), "count=0: must be at least 1"),
        (Outer(limit=0), "limit=0: must be at least 1"),
        (Outer(count=-(10**400)), "count=-1000"),
        (Outer(count=2**63), "count=9223372036854775808: must be a finite number of 64 bits, at least 1"),
        (Outer(scale=math.nan), "scale=nan: must be a finite number of 64 bits"),
        (Outer(scale=-math.inf), "scale=-inf: must be a finite number of 64 bits"),
        (Outer(inner=Inner(rate=1.01)), "inner.rate=1.01: must be at least 0 and at most 1"),
        (
            Outer(inner=Inner(rate=math.nan)),
            "inner.rate=nan: must be a finite number of 64 bits, at least 0 and at most 1",
        ),
        (Outer(inner=Inner(rates=[0.1, 0.0])), "inner.rates=[0.1,0.0]: each of them must be above 0"),
        (Outer(optional=Inner(rate=-0.1)), "optional.rate=-0.1: must be at least 0 and at most 1"),
    ],
)
def test_a_number_out_of_bounds_is_named(config: Outer, line: str) -> None:
    [found] = out_of_bounds(config)
    assert found.startswith(line)


def test_every_number_out_of_bounds_is_found() -> None:
    assert len(out_of_bounds(Outer(count=0, scale=math.inf, inner=Inner(rate=2, rates=[-1])))) == 4


def bounded_knobs() -> list[tuple[str, type, str]]:
    """Every knob of a run that holds numbers: its name, and each schema that has it."""
    menus = {"": run_menu()}
    return [
        (f"{program}{key.name}", schema, key.name.rpartition(".")[2])
        for program, menu in menus.items()
        for key in menu.keys.values()
        for schema in key.schemas
        if re.search(r"\b(int|float)\b", key.type_name)
    ]


@pytest.mark.parametrize(("name", "schema", "field"), bounded_knobs())
def test_a_refusal_names_the_knob_and_a_value_that_it_takes(name: str, schema: type, field: str) -> None:
    """The value is the bound that was passed, where there is one."""
    for number in (-(2**62), -1e30, 2**62, 1e30, 2**64, math.nan, math.inf, -math.inf):
        check_refusal(schema, field, number)


def check_refusal(schema: type, field: str, number: float) -> None:
    config, bounds = schema(), bounds_of(next(each for each in dataclasses.fields(schema) if each.name == field))
    setattr(config, field, [number] if isinstance(getattr(config, field), list) else number)
    mine = [line for line in out_of_bounds(config) if line.startswith(f"{field}=")]
    if bounds.admits(number):
        assert mine == []
        return
    [line] = mine
    remedy = re.fullmatch(rf"{field}=\S+: .*must be .*; use {field}=(\S+)", line)
    assert remedy is not None, line
    wanted = yaml.safe_load(remedy.group(1))
    setattr(config, field, wanted)
    assert out_of_bounds(config) == []
    limit = bounds.least if number < 0 else bounds.most
    if limit is not None and not math.isnan(number):
        assert wanted in (limit, [limit])


@given(st.floats() | st.integers(-(2**62), 2**62), st.floats(-10, 10), st.floats(-10, 10))
def test_bounds_admit_what_lies_between_them(number: float, low: float, high: float) -> None:
    inside = math.isfinite(number)
    assert Bounds(least=low, most=high).admits(number) == (inside and low <= number <= high)
    assert Bounds(above=low).admits(number) == (inside and number > low)


def test_bounds_read_as_a_sentence_goes_on() -> None:
    fields = {
        each.name: bounds_of(each).in_words() for each in (*dataclasses.fields(Outer), *dataclasses.fields(Inner))
    }
    assert fields["count"] == "at least 1" and fields["rates"] == "above 0" and fields["scale"] == fields["inner"] == ""
    assert Bounds(above=0, most=1).in_words() == "above 0 and at most 1"
