"""Finds the name that the user may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name most like `word`: one that ends in it (`limit` for workload.limit), else a spelling close to
    it."""
    names = list(names)
    leaves = {name.rpartition(".")[2]: name for name in reversed(names)}
    if word in leaves:
        return leaves[word]
    for candidates in ({name: name for name in names}, leaves):
        close = get_close_matches(word, candidates, n=1)
        if close:
            return candidates[close[0]]
    return None


def one_of(key: str, values: Iterable[str]) -> str:
    """Return an override that can be typed, followed by the other values: `drafter=eagle3 (or ngram, oracle)`."""
    first, *others = values
    return f"{key}={first} (or {', '.join(others)})" if others else f"{key}={first}"


def hint(near: str | None) -> str:
    """Return the end of a sentence that refuses a name, with a suggestion if there is one."""
    return f"; did you mean {near}?" if near else "; see --help"
