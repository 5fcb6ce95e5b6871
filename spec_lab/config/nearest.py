"""Finds the name that the user may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name with the most similar spelling, else one whose last part is like that of `word`; None without
    one."""
    names = sorted(names)
    leaves = {name.rpartition(".")[2]: name for name in reversed(names)}
    whole = get_close_matches(word, names, n=1, cutoff=0.75)
    return next(
        iter([*whole, *(leaves[leaf] for leaf in get_close_matches(word.rpartition(".")[2], leaves, n=1))]), None
    )


def hint(near: str | None) -> str:
    """Return the end of a sentence that refuses a name, with a suggestion if there is one."""
    return f"; did you mean {near}?" if near else "; see --help"
