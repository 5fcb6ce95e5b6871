"""Reads the YAML file of a paper: the lines of its tables, and their tasks, temperatures, batch sizes and K."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from spec_lab.core.errors import UserError
from spec_lab.menu.nearest import hint, nearest
from spec_lab.menu.refusals.run import refuse_name

KEYS = (
    *("name", "minutes", "always", "greedy", "sampled", "base", "lines"),
    *("tasks", "temperatures", "ablations", "speed"),
)
LINE_KEYS = ("always", "greedy", "sampled", "temperatures")
LARGEST = 1e9
"""The largest number in the file: a temperature, batch size, K or number of minutes."""
AXES = {"sampling": "temperatures", "sampling.temperature": "temperatures"}
"""Keys of a run that a key of the paper sets: the tables have a row for each value, so no override may set them."""
SPEED_AXES = {"batch_size": "speed.batch_sizes", "drafter.num_draft_tokens": "speed.draft_tokens"}
MEAN = "mean"
"""The name of the row with the mean over tasks."""
SPEED_KEYS = ("always", "batch_sizes", "draft_tokens", "lines")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the tables: a drafter with its rule, or an ablation, whose overrides change the base's line.

    Attributes:
        always: overrides at all temperatures.
        greedy: overrides at temperature 0, in addition to the paper's. None means no further ones; in an ablation,
            those of the base's line.
        sampled: overrides at other temperatures, in place of the paper's. None means the paper's; in an ablation, those
            of the base's line.
        temperatures: the temperatures at which it is run. None means the paper's; in an ablation, the paper's first
            one.
    """

    name: str
    always: tuple[str, ...]
    greedy: tuple[str, ...] | None = None
    sampled: tuple[str, ...] | None = None
    temperatures: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class SpeedPart:
    """The measurement of the frontier: overrides for its prompts, batch sizes, fixed K, and its lines."""

    always: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    draft_tokens: tuple[int, ...]
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PaperFile:
    """A paper.

    Attributes:
        minutes: the author's estimate for the whole study; None if there is none.
        always: overrides for every run.
        greedy: overrides at temperature 0.
        sampled: overrides at other temperatures.
        base: name of the line that others are compared with.
        tasks: overrides that choose prompts, by name.
        ablations: lines that change the base's line by their overrides.
        speed: None if no frontier is asked for.
    """

    path: Path
    name: str
    minutes: float | None
    always: tuple[str, ...]
    greedy: tuple[str, ...]
    sampled: tuple[str, ...]
    base: str
    lines: tuple[Line, ...]
    tasks: Mapping[str, tuple[str, ...]]
    temperatures: tuple[float, ...]
    ablations: tuple[Line, ...]
    speed: SpeedPart | None

    def line(self, name: str) -> Line:
        """Return the line with that name."""
        return next(line for line in self.lines if line.name == name)


def read_paper(path: Path) -> PaperFile:
    """Read and check a paper's file.

    Raises:
        UserError: it cannot be read, or an entry is wrong; the message names the entry.
    """
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; name a file such as conf/paper/pocket.yaml") from error
    fields = Fields(path, "", _mapping(path, "the file", values), KEYS)
    lines = tuple(_line(path, "lines", name, value) for name, value in fields.mapping("lines", required=True).items())
    name = fields.text("name", path.stem)
    if (refused := refuse_name(name)) is not None:
        raise UserError(f"{path}: {refused}")
    base = fields.text("base", lines[0].name)
    if base not in {line.name for line in lines}:
        raise UserError(f"{path}: base: {_no_line(base, [line.name for line in lines])}")
    minutes, temperatures = fields.numbers("minutes"), fields.numbers("temperatures") or (0.0,)
    if len(minutes) > 1:
        raise UserError(f"{path}: minutes must be one number")
    tasks = fields.mapping("tasks", required=True)
    ablations = [_line(path, "ablations", key, value) for key, value in fields.mapping("ablations").items()]
    _refuse_idle(path, lines, ablations, temperatures)
    _refuse_alike(path, [*lines, *ablations], tasks)
    return PaperFile(
        path=path,
        name=name,
        minutes=next(iter(minutes), None),
        always=fields.overrides("always"),
        greedy=fields.overrides("greedy"),
        sampled=fields.overrides("sampled"),
        base=base,
        lines=lines,
        tasks={name: overrides_in(path, f"tasks.{name}", value) for name, value in tasks.items()},
        temperatures=temperatures,
        ablations=tuple(ablations),
        speed=_speed(path, fields.values["speed"], lines) if "speed" in fields.values else None,
    )


def _refuse_idle(path: Path, lines: Sequence[Line], ablations: Sequence[Line], temperatures: Sequence[float]) -> None:
    """Raise UserError for a line at a temperature that no table has, and for an ablation that changes nothing."""
    for line in lines:
        if other := [each for each in line.temperatures or () if each not in temperatures]:
            raise UserError(
                f"{path}: lines.{line.name}.temperatures: {other[0]:g} is not one of the paper's temperatures"
            )
    for ablation in ablations:
        if not (ablation.always or ablation.greedy or ablation.sampled):
            raise UserError(
                f"{path}: ablations.{ablation.name} changes nothing; add the overrides that it tests, such as "
                "[prune=none]"
            )


def _refuse_alike(path: Path, lines: Sequence[Line], tasks: Collection[str]) -> None:
    """Raise UserError for names that would make two rows of a table look the same."""
    names = [line.name.strip() for line in lines]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{path}: {twice} is the name of two lines or ablations; give one of them another name")
    for name in tasks:
        if name.strip() == MEAN or any(name.startswith(f"{task}: ") for task in tasks):
            raise UserError(f"{path}: tasks.{name} has the name of another row of the tables; give it another name")


def _no_line(name: str, names: Sequence[str]) -> str:
    near = nearest(name, names)
    return f"no line {name}" + (hint(near) if near else f"; there are {', '.join(names)}")


@dataclass(frozen=True, slots=True)
class Fields:
    """The keys of a mapping, each read as the required type."""

    path: Path
    place: str
    values: Mapping[str, Any]
    known: Sequence[str]

    def __post_init__(self) -> None:
        for key in self.values:
            if key not in self.known:
                near = nearest(str(key), self.known)
                remedy = hint(near) if near else f"; there are {', '.join(self.known)}"
                raise UserError(f"{self.path}: no key {self.place}{key}{remedy}")

    def text(self, key: str, default: str) -> str:
        """Return a text, or the default if the key is missing."""
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise UserError(f"{self.path}: {self.place}{key} must be a text")
        return value

    def mapping(self, key: str, required: bool = False) -> Mapping[str, Any]:
        """Return a mapping whose keys are names; empty if the key is missing."""
        found = _mapping(self.path, f"{self.place}{key}", self.values.get(key, {}))
        if required and not found:
            raise UserError(f"{self.path}: {self.place}{key} must have at least one name, as in conf/paper/pocket.yaml")
        return found

    def overrides(self, key: str) -> tuple[str, ...]:
        """Return a list of `KEY=VALUE`."""
        return overrides_in(self.path, f"{self.place}{key}", self.values.get(key, []))

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return numbers, written as one or as a list, none below 0; empty if the key is missing."""
        value = self.values.get(key, [])
        listed = value if isinstance(value, list) else [value]
        if (key in self.values and not listed) or not all(map(_is_number, listed)):
            raise UserError(
                f"{self.path}: {self.place}{key} must hold numbers of 0 or more; correct it or leave it out"
            )
        return tuple(dict.fromkeys(float(item) for item in listed))

    def counts(self, key: str) -> tuple[int, ...]:
        """Return one or more integers, written as one or as a list, none below 1."""
        found = self.numbers(key)
        if not found or any(item < 1 or item != int(item) for item in found):
            raise UserError(f"{self.path}: {self.place}{key} must hold whole numbers of 1 or more")
        return tuple(map(int, found))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= LARGEST


def key_of(override: str) -> str:
    """Return the key that an override sets."""
    return override.lstrip("+").partition("=")[0]


def overrides_in(path: Path, place: str, value: Any) -> tuple[str, ...]:
    """Read a list of `KEY=VALUE`."""
    if not isinstance(value, list) or not all(isinstance(item, str) and "=" in item for item in value):
        raise UserError(f"{path}: {place} must be a list of KEY=VALUE, such as [drafter=eagle3, prune=catchup]")
    for item in value:
        name = key_of(item)
        if (axis := AXES.get(name)) is not None:
            remedy = "leave it out, since they choose it" if name == "sampling" else "write it there"
            raise UserError(f"{path}: {place}: {item} belongs to {axis}; {remedy}")
    return tuple(value)


def _line(path: Path, group: str, name: str, value: Any) -> Line:
    place = f"{group}.{name}"
    if not isinstance(value, dict):
        return Line(name, overrides_in(path, place, value))
    fields = Fields(path, f"{place}.", value, LINE_KEYS)
    return Line(
        name,
        fields.overrides("always"),
        fields.overrides("greedy") if "greedy" in value else None,
        fields.overrides("sampled") if "sampled" in value else None,
        fields.numbers("temperatures") or None,
    )


def _speed(path: Path, value: Any, lines: Sequence[Line]) -> SpeedPart:
    fields = Fields(path, "speed.", _mapping(path, "speed", value), SPEED_KEYS)
    names = [line.name for line in lines]
    chosen = fields.values.get("lines", names)
    if not isinstance(chosen, list) or not chosen:
        raise UserError(f"{path}: speed.lines must be a list of lines, such as [{names[0]}]")
    for name in chosen:
        if name not in names:
            raise UserError(f"{path}: speed.lines: {_no_line(str(name), names)}")
    always = fields.overrides("always")
    for item in always:
        if (axis := SPEED_AXES.get(key_of(item))) is not None:
            raise UserError(f"{path}: speed.always: {item} belongs to {axis}; write it there")
    return SpeedPart(
        always=always,
        batch_sizes=fields.counts("batch_sizes"),
        draft_tokens=fields.counts("draft_tokens"),
        lines=tuple(dict.fromkeys(chosen)),
    )


def _mapping(path: Path, place: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not all(map(_is_name, value)):
        raise UserError(f"{path}: {place} must map printable names to their entries, as conf/paper/pocket.yaml does")
    return value


def _is_name(key: object) -> bool:
    return isinstance(key, str) and key.isprintable() and bool(key.strip())
