"""An option is one class: its knobs are fields, `check` says what cannot work, `build` makes the part.

    @option("drafter", "copycat")
    class Copycat(DrafterConfig):
        "Repeats the last token."

        offset: int = knob(0, "added to the id of the token that is repeated", least=0)

        def build(self, lab):  # torch is imported here
            from my_lab.parts import CopycatDrafter

            return CopycatDrafter(self.num_draft_tokens, self.offset)

Importing the module registers the class: for `get`, for `--help`, and for Hydra as `/schema/GROUP/NAME`. A YAML
file `conf/GROUP/NAME.yaml` that names this schema in its defaults puts the option on the menu.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

from spec_lab.core.errors import UserError

if TYPE_CHECKING:
    from spec_lab.config.run import Run

Class = TypeVar("Class", bound=type)
VALUES = ("drafter.plan", "prune.prefill", "prune.catchup", "workload.checker")
"""Groups whose options are the values of one knob. They have no knobs and no YAML file."""
BOUNDS = {"least": "at least", "most": "at most", "above": "above"}

_options: dict[str, dict[str, type[Any]]] = {}


def knob(default: Any, explanation: str, **bounds: float) -> Any:
    """Make a field with its line in `--help`. Of a class an instance is the default.

    Args:
        bounds: `least`, `most` and `above`; in a list they are those of each number.
    """
    metadata = {"help": explanation, "bounds": {BOUNDS[side]: bound for side, bound in bounds.items()}}
    if isinstance(default, (list, dict, type)):
        return field(default_factory=default if isinstance(default, type) else default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def default_of(knob: Field[Any]) -> Any:
    """Return the default of a knob; MISSING if it has none."""
    return knob.default_factory() if callable(knob.default_factory) else knob.default


class Part:
    """The base of the options of every group."""

    def check(self, run: Run) -> Iterator[str]:
        """Yield a line with knob and remedy for each reason why `run`, which chose this option, cannot work."""
        yield from ()

    def files(self, run: Run) -> list[Path]:
        """Return the files and folders that `run` reads for this option. A UserError refuses the run."""
        path = getattr(self, "path", None)
        return [] if path is None else [Path(path)]


@dataclass_transform()
def option(group: str, name: str) -> Callable[[Class], Class]:
    """Make a class the option `GROUP=NAME`. It becomes a dataclass whose field `name` has this name.

    Raises:
        UserError: another class has that name.
    """

    def register(cls: Class) -> Class:
        there = _options.setdefault(group, {})
        if name in there and _place(there[name]) != _place(cls):
            raise UserError(
                f"{group}={name} is {there[name].__qualname__} already; give {cls.__qualname__} another name"
            )
        cls.name = name  # type: ignore[attr-defined]
        if group not in VALUES:
            cls.__annotations__ = {"name": "str", **inspect.get_annotations(cls)}
            cls = dataclass(cls)  # type: ignore[assignment]
        there[name] = cls
        return cls

    return register


def options(group: str) -> Mapping[str, type[Any]]:
    """Return the classes of a group by name."""
    return _options.get(group, {})


def get(group: str, name: str) -> type[Any]:
    """Return the class of an option; UserError if there is none."""
    if name not in options(group):
        raise UserError(f"{group}={name}: nothing builds it; use one of {', '.join(options(group))}")
    return options(group)[name]


def _place(cls: type) -> tuple[str, str]:
    """Where a class is defined: a module that is imported again, as in a notebook, defines the same one."""
    return cls.__module__, cls.__qualname__
