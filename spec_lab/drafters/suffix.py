"""Suffix decoding: drafts the most frequent continuation of the text's suffix, in the request or in other outputs.

Each running request has a suffix tree of its own text, and one shared tree has the newest outputs of ended requests.
All are on the host, which looks up drafts before it launches a round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from spec_lab.core.types import Request, Sequence
from spec_lab.drafters.suffix_tree import DraftLimits, SuffixDraft, SuffixTree


@dataclass(frozen=True, slots=True)
class SuffixSizes:
    """The sizes of the trees and of drafts.

    Attributes:
        depth: tokens of the longest counted sequence, match and draft together. A draft may go on past this depth where
            it follows a single text.
        limits: the limits of a draft; it has at most K tokens.
        num_outputs: the most outputs in the shared tree; the newest ones are kept.
    """

    depth: int
    limits: DraftLimits
    num_outputs: int


class SuffixLookup:
    """A suffix tree for each running request, and a shared one for the outputs of ended requests.

    Every request gets the trees' draft, which may be empty, and never one of the device.
    """

    num_on_device = 0
    part_names: tuple[str, str] | None = None

    def __init__(self, sizes: SuffixSizes) -> None:
        self._sizes = sizes
        self.restart()

    def restart(self) -> None:
        """Drop all texts."""
        self._outputs = SuffixTree(self._sizes.depth)
        self._kept: deque[list[int]] = deque()
        self._own: dict[int, SuffixTree] = {}
        self._texts: dict[int, list[int]] = {}

    def admit(self, slot: int, request: Request) -> None:
        """Begin a tree for the request that takes `slot`, with its prompt."""
        tree = SuffixTree(self._sizes.depth)
        self._texts[slot] = tree.begin()
        tree.extend(request.prompt_ids)
        self._own[slot] = tree

    def draft(self, sequences: Iterable[Sequence]) -> list[list[int] | None]:
        return [self.look_up(sequence).tokens for sequence in sequences]

    def look_up(self, sequence: Sequence) -> SuffixDraft:
        """Add the new tokens of a request, and return the better of the two trees' drafts."""
        limits, tree, text = self._sizes.limits, self._own[sequence.slot], self._texts[sequence.slot]
        tree.extend(sequence.tokens[len(text) :])
        own, others = tree.look_up_own(limits), self._outputs.look_up(text, limits)
        return own if own.score >= others.score else others

    def finish(self, sequence: Sequence) -> None:
        """Drop the tree of a request that has ended, and add its output to the shared tree."""
        del self._own[sequence.slot], self._texts[sequence.slot]
        if self._sizes.num_outputs == 0:
            return
        if len(self._kept) == self._sizes.num_outputs:
            self._outputs.forget(self._kept.popleft())
        self._kept.append(self._outputs.begin())
        self._outputs.extend(sequence.tokens[len(sequence.request.prompt_ids) :])
