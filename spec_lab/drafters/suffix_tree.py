"""A suffix tree: counts how often each token sequence, up to a depth, occurs in some texts. It does not import torch.

Suffix decoding (Oliaro et al., arXiv 2411.04975) keeps such trees on the host; ArcticInference has them in C++. Here
each node has a dictionary of children. A leaf is a sequence that has occurred once. It points into its text, and gets
children when it occurs again. So the size of a tree depends on how much repeats.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


class _Node:
    """A token sequence, and its continuations.

    Attributes:
        token: its last token.
        count: how often it occurs.
        children: the sequences with one more token, by that token; None for a leaf. A leaf occurs once, and continues
            in `text` at `place`.
        likeliest: the most frequent child; None without children. Of equals it is the one counted last; after
            `drop_one` has chosen anew, the one added first.
    """

    __slots__ = ("children", "count", "likeliest", "place", "text", "token")

    def __init__(self, token: int, text: list[int], place: int) -> None:
        self.token = token
        self.count = 1
        self.children: dict[int, _Node] | None = None
        self.likeliest: _Node | None = None
        self.text = text
        self.place = place

    def add(self, token: int, text: list[int], place: int) -> _Node | None:
        """Count another occurrence of a child. Return the child if it existed before; else make it a leaf, and return
        None."""
        assert self.children is not None, "a leaf was unfolded before anything is added"
        child = self.children.get(token)
        if child is None:
            self.children[token] = added = _Node(token, text, place)
            if self.likeliest is None or self.likeliest.count <= 1:
                self.likeliest = added
            return None
        child.count += 1
        if self.likeliest is None or child.count >= self.likeliest.count:
            self.likeliest = child
        return child

    def unfold(self, may_go_on: bool) -> None:
        """Turn a leaf that occurs again into an inner node. Its child, if any, is the token after its first
        occurrence."""
        if self.children is None:
            self.children = {}
            if may_go_on and self.place < len(self.text):
                self.add(self.text[self.place], self.text, self.place + 1)

    def drop_one(self, token: int) -> _Node | None:
        """Remove one occurrence of a child. Return the child if it still occurs, else None."""
        assert self.children is not None, "a node that occurred twice was unfolded"
        child = self.children[token]
        child.count -= 1
        if child.count == 0:
            del self.children[token]
        if child is self.likeliest:
            self.likeliest = max(self.children.values(), key=lambda node: node.count, default=None)
        return child if child.count else None


@dataclass(frozen=True, slots=True)
class SuffixDraft:
    """A draft from a tree.

    Attributes:
        score: the expected number of accepted tokens: the sum over tokens of the probability that the draft is right up
            to that token.
    """

    tokens: list[int]
    score: float


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """The limits on the length of a draft.

    Attributes:
        most: the most tokens of a draft.
        factor: the most tokens of a draft, divided by the length of its match.
        least_probability: a draft ends before its probability, a product of count ratios, falls below this.
    """

    most: int
    factor: float
    least_probability: float


NOTHING = SuffixDraft([], 0.0)


class SuffixTree:
    """The suffix tree of some texts; only the newest text can grow.

    Attributes:
        depth: tokens of the longest counted sequence.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._text: list[int] = []
        self._root = _Node(-1, self._text, 0)
        self._root.children = {}
        self._ends = [self._root]  # nodes of the newest text's suffixes of 0, 1, ... tokens that occurred before

    def begin(self) -> list[int]:
        """Begin another text, and return the list that identifies it."""
        self._text = []
        self._ends = [self._root]
        return self._text

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the newest text."""
        for token in tokens:
            self._text.append(token)
            ends, place = [self._root], len(self._text)
            for length, node in enumerate(self._ends, start=1):
                child = node.add(token, self._text, place)
                if child is not None:
                    child.unfold(may_go_on=length < self.depth)
                    if length < self.depth:
                        ends.append(child)
            self._ends = ends

    def forget(self, text: list[int]) -> None:
        """Remove a text. The newest text may only be removed if it does not grow any more."""
        for start in range(len(text)):
            node: _Node | None = self._root
            for token in text[start : start + self.depth]:
                assert node is not None
                node = node.drop_one(token)
                if node is None:
                    break

    def look_up(self, text: Sequence[int], limits: DraftLimits) -> SuffixDraft:
        """Return the draft with the highest score to follow `text`.

        For each match length the candidate is the likeliest continuation within the limits.
        """
        return _best(self._matches(text), limits)

    def look_up_own(self, limits: DraftLimits) -> SuffixDraft:
        """Return the same for the newest text."""
        return _best(((node, node.place) for node in self._ends[1:]), limits)

    def _matches(self, text: Sequence[int]) -> Iterator[tuple[_Node, int]]:
        """Yield the match of the last token, the last two tokens, and so on, while something follows the match."""
        for length in range(1, min(self.depth, len(text)) + 1):
            place = self._find(text[len(text) - length :])
            if place is None:
                return  # then nothing follows a longer match either
            yield place

    def _find(self, tokens: Sequence[int]) -> tuple[_Node, int] | None:
        """Return the node of a sequence, and for a leaf the place where its text continues.

        Return None if the sequence does not occur, or if nothing follows it.
        """
        node, place = self._root, 0
        for token in tokens:
            if node.children is not None:
                child = node.children.get(token)
                if child is None:
                    return None
                node, place = child, child.place
            elif place < len(node.text) and node.text[place] == token:
                place += 1
            else:
                return None
        goes_on = place < len(node.text) if node.children is None else node.likeliest is not None
        return (node, place) if goes_on else None


def _best(matches: Iterable[tuple[_Node, int]], limits: DraftLimits) -> SuffixDraft:
    """Return the best draft for matches of 1, 2, ... tokens; of equals, that of the longest match."""
    best = NOTHING
    for length, (node, place) in enumerate(matches, start=1):
        found = _follow(node, place, min(limits.most, int(length * limits.factor)), limits.least_probability)
        if found.tokens and found.score >= best.score:
            best = found
    return best


def _follow(node: _Node, place: int, most: int, least_probability: float) -> SuffixDraft:
    """Return the likeliest continuation of a node, or of a leaf's text from `place` on."""
    tokens: list[int] = []
    probability, score = 1.0, 0.0
    while len(tokens) < most:
        if node.children is None:
            if place >= len(node.text):
                break
            tokens.append(node.text[place])
            place += 1
        else:
            child = node.likeliest
            if child is None:
                break
            probability *= child.count / node.count
            if probability < least_probability:
                break
            tokens.append(child.token)
            node, place = child, child.place
        score += probability
    return SuffixDraft(tokens, score)
