"""The sizes of a draft tree, which other parts are made to. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TreeSizes:
    """The fixed sizes of a tree, whatever tokens are in it.

    Attributes:
        depth: drafts on its longest path, which stand for K: a round emits 1..depth + 1 tokens.
        num_rows: rows a request that verify runs: the pending token, which is the root, and the drafts.
        topk: likeliest continuations that are looked at of a drafted token.
        width: rows a request of the widest draft step.
        spine: drafts on the path of likeliest ones, as far as a tree is bound to have a place for them.
    """

    depth: int
    num_rows: int
    topk: int
    width: int
    spine: int
