"""Finds the name that the user may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

LEAST_LIKE = 0.62
"""How alike two spellings must be, of 1: `temp` is not `system`."""


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name most like `word`: one that ends in it (`limit` for workload.limit), else a spelling close to
    it."""
    names = list(names)
    leaves = {name.rpartition(".")[2]: name for name in reversed(names)}
    group, _, leaf = word.rpartition(".")
    if leaf in leaves:
        return leaves[leaf]
    # What both names share would hide that the rest of them differs.
    siblings = {name.rpartition(".")[2]: name for name in names if group and name.rpartition(".")[0] == group}
    others = {name: name for name in names if name not in (group, *siblings.values())}
    for typed, candidates in ((leaf, siblings), (word, others), (leaf, leaves)):
        close = get_close_matches(typed, candidates, n=1, cutoff=LEAST_LIKE)
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
