"""A refusal's remedies can be typed as they stand, and lead to a run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from spec_lab.config.checks import problems
from spec_lab.core.errors import UserError
from tests.test_compatibility import FORBIDDEN, compose, folders, no_interpreter

__all__ = ["folders", "no_interpreter"]

OVERRIDE = re.compile(r"(?<![\w.=/\[])([a-z_]+(?:\.[a-z_]+)*=(?:\[\S*\]|[^\s,;:()]+))")
ALTERNATIVES = re.compile(r",? or (?=[a-z_]+[.=])|, (?=[a-z_.]+=)")
WITHOUT = re.compile(r" without ([a-z_.]+)")
PLACEHOLDER = re.compile(r"[A-Z]{2,}")
OF_THE_USER = re.compile(r" is no (file|folder); | [A-Z]{2,}\b[^;]*$|=[A-Z]{2,}\b[^;]*$")
REFUSED_KEY = re.compile(r"[a-z_]+(?:\.[a-z_]+)+|num_threads")
MOST_STEPS = 4


def remedies(overrides: tuple[str, ...], message: str) -> Iterator[tuple[str, ...]]:
    """The command as each alternative of a refusal's remedy makes it; what only the user can fill in is left out."""
    said, _, remedy = message.rpartition("; ")
    key = REFUSED_KEY.match(message)
    if key is not None and remedy.startswith("leave"):
        yield without(overrides, {key[0]})
    for alternative in ALTERNATIVES.split(remedy):
        typed = [text for text in OVERRIDE.findall(alternative) if not PLACEHOLDER.search(text)]
        if said and typed:
            replaced = {text.partition("=")[0] for text in typed} | set(WITHOUT.findall(alternative))
            yield (*without(overrides, replaced), *typed)


def without(overrides: tuple[str, ...], keys: set[str]) -> tuple[str, ...]:
    return tuple(text for text in overrides if text.partition("=")[0] not in keys)


def refusal_of(overrides: tuple[str, ...]) -> str | None:
    """The first line that is said against a command. What is no refusal is raised."""
    try:
        return next(iter(list(problems(compose(*overrides)))), None)
    except UserError as error:
        return str(error)


def leads_to_a_run(overrides: tuple[str, ...], seen: tuple[str, ...]) -> bool:
    """Whether some way along the remedies ends in a run, or at a file or a number of processes of the user's."""
    message = refusal_of(overrides)
    if message is None or OF_THE_USER.search(message):
        return True
    if message in seen or len(seen) > MOST_STEPS:
        return False
    return any(leads_to_a_run(remedied, (*seen, message)) for remedied in remedies(overrides, message))


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(tuple(overrides), marks=pytest.mark.slow if place % 16 else [], id=" ".join(overrides))
        for place, (overrides, _, _) in enumerate(FORBIDDEN)
    ],
)
def test_remedy_that_is_typed_leads_to_a_run(overrides: tuple[str, ...], folders: Path) -> None:
    message = refusal_of(overrides)
    assert message is not None
    for remedied in remedies(overrides, message):
        then, typed = refusal_of(remedied) or "", set(remedied) - set(overrides)
        if OF_THE_USER.search(then):
            continue
        assert then != message
        assert not then.startswith(tuple(text.partition("=")[0] for text in typed)), "it refuses what was advised"
        assert leads_to_a_run(remedied, ()), remedied


def test_remedies_are_found_in_a_refusal() -> None:
    message = "acceptance=x needs y; use sampling.temperature=0 or acceptance=rejection acceptance.method=one_hot"
    assert list(remedies(("acceptance=x", "seed=1"), message)) == [
        ("acceptance=x", "seed=1", "sampling.temperature=0"),
        ("seed=1", "acceptance=rejection", "acceptance.method=one_hot"),
    ]
    assert list(remedies(("a.b=1", "seed=1"), "a.b=1 is not read; leave it out or choose a=c (or d)")) == [
        ("seed=1",),
        ("a.b=1", "seed=1", "a=c"),
    ]
    assert list(remedies((), "target=hf needs one; add target.path=FOLDER")) == []
