"""Decides which runs may be compared: those with the same definitions, the same prompts and the same versions.

If any of these differs too, a difference need not come from what was changed on purpose.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from spec_lab.record.runs import Run
from spec_lab.record.versions import SINCE_JUDGED_ROUNDS
from spec_lab.report.prompts import prompts_id

COMPARED_NUMBERS = (
    "acceptance_length", "acceptance_length_all", "acceptance_rate_by_position", "decode_tokens_per_second", "speedup",
    "break_even_acceptance_length", "accuracy",
)  # fmt: skip
"""Numbers whose definitions must be the same in runs that are compared."""
BESIDE_THE_RUN = (
    *("output_dir", "fresh", "objective", "auto"),
    *("logger", "name", "record", "profile_rounds"),
)
"""Keys that say how a run is started, and where and what it records. They do not change what the run decodes."""
SHOWN_REASONS = 3


@dataclass(frozen=True, slots=True)
class NumberedRun:
    """A run with its number in the table of runs, and its prompts as `prompts_id` names them."""

    number: int
    run: Run
    prompts: str | None

    @property
    def label(self) -> str:
        return f"#{self.number}"


def numbered(runs: Iterable[Run]) -> list[NumberedRun]:
    """Return the runs as the table of runs numbers them."""
    return [NumberedRun(number, run, prompts_id(run)) for number, run in enumerate(runs, start=1)]


def comparable_sets(runs: Sequence[NumberedRun]) -> list[list[NumberedRun]]:
    """Return the runs as sets within which they may be compared, in their order.

    A run without `prompts`, such as one that did not finish, is in every set with its definitions and versions. It is
    not compared, but a table can say how it ended. Such runs that fit no set make a last one together.
    """
    sets: list[list[NumberedRun]] = []
    for run in (run for run in runs if run.prompts is not None):
        home = next((found for found in sets if not any(differences(found[0], run))), None)
        if home is None:
            sets.append([run])
        else:
            home.append(run)
    homeless: list[NumberedRun] = []
    for run in (run for run in runs if run.prompts is None):
        homes = [found for found in sets if not any(_other_standards(found[0].run, run.run))]
        for found in homes:
            found.append(run)
        if not homes:
            homeless.append(run)
    return [sorted(found, key=lambda run: run.number) for found in [*sets, *([homeless] if homeless else [])]]


def sets_of_standards(runs: Sequence[NumberedRun]) -> list[list[NumberedRun]]:
    """Return the runs as sets with the same definitions and versions, for tables in which one of the knobs chooses the
    prompts."""
    sets: list[list[NumberedRun]] = []
    for run in runs:
        home = next((found for found in sets if not any(_other_standards(found[0].run, run.run))), None)
        if home is None:
            sets.append([run])
        else:
            home.append(run)
    return sets


def differences(base: NumberedRun, other: NumberedRun) -> Iterator[str]:
    """Yield the reasons why two runs must not be compared, a few words each; none if they may be."""
    yield from _other_standards(base.run, other.run)
    if base.prompts != other.prompts:
        yield "other prompts"


def refusals(sets: Sequence[Sequence[NumberedRun]]) -> list[str]:
    """Return, for each set after the first, a line that says why it is kept apart."""
    return [
        f"not compared with {sets[0][0].label}: {', '.join(run.label for run in others)} "
        f"({_shorten(list(differences(sets[0][0], others[0])))}); --anyway compares them"
        for others in sets[1:]
    ]


def _shorten(reasons: Sequence[str]) -> str:
    more = len(reasons) - SHOWN_REASONS
    return ", ".join([*reasons[:SHOWN_REASONS], *([f"{more} more"] if more > 0 else [])])


def _other_standards(base: Run, other: Run) -> Iterator[str]:
    """Yield in what definitions two runs differ, then in what versions."""
    ours, theirs = base.summary["definitions"], other.summary["definitions"]
    others = [name for name in COMPARED_NUMBERS if ours.get(name) != theirs.get(name)]
    if others:
        versions = (base.summary["schema_version"], other.summary["schema_version"])
        layouts = "" if versions[0] == versions[1] else f" (schema versions {versions[0]} and {versions[1]})"
        yield f"other definitions of {' and '.join(others[:2])}{' and more' if len(others) > 2 else ''}{layouts}"
    elif _is_old(base) != _is_old(other):
        yield "the acceptance length of schema versions 1 and 2, and that of later ones"
    yield from _other_versions(base.summary["versions"], other.summary["versions"])


def _is_old(run: Run) -> bool:
    return run.summary["schema_version"] < SINCE_JUDGED_ROUNDS


def _other_versions(base: Mapping[str, str | None], other: Mapping[str, str | None]) -> Iterator[str]:
    for package in sorted(base.keys() | other.keys()):
        if base.get(package) != other.get(package):
            yield f"{package} {base.get(package) or 'absent'} and {other.get(package) or 'absent'}"
