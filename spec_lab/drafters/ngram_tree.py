"""Prompt lookup that drafts a tree: it merges the tokens after several earlier occurrences of the text's suffix.

SGLang's NGRAM and suffix decoding keep such a trie on the host. Here it is rebuilt in every round, with tensors, from
the token history on the device. With one occurrence it is a chain, as in prompt lookup.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_lab.core.draft_tree import DraftTree
from spec_lab.core.types import DraftStep
from spec_lab.drafters.history import NewTokens, TokenHistory, write_tokens
from spec_lab.drafters.ngram import HistoryLookup

NUM_MATCHES = 16
"""At most so many occurrences are used: the longest matches first, and of equally long ones the latest."""


@dataclass(slots=True)
class LookedUpTree:
    """A round's tree; `tokens` and `attention`, which a draft loop could read, are None."""

    tree: DraftTree
    tokens: None = None
    attention: None = None


@dataclass(slots=True)
class Continuations:
    """The tokens after each match, the best match first; both fields are [batch, matches, depth].

    Attributes:
        known: false past the end of the text, and for matches that do not exist.
    """

    tokens: torch.Tensor
    known: torch.Tensor


class NgramTreeDrafter(HistoryLookup[LookedUpTree]):
    """Drafts a tree of the tokens after earlier matches. A row without a draft is its own parent."""

    def __init__(
        self, depth: int, num_rows: int, topk: int, max_ngram: int, min_ngram: int, history: TokenHistory
    ) -> None:
        super().__init__(depth, history)
        self._num_rows = num_rows
        self._topk = topk
        self._max_ngram = max_ngram
        self._min_ngram = min_ngram

    def step(self, state: LookedUpTree, step: DraftStep) -> None:
        """Do nothing: all levels are looked up at once."""

    def finish(self, state: LookedUpTree) -> DraftTree:
        return state.tree

    def propose(self, new: NewTokens) -> LookedUpTree:
        write_tokens(self.history.tokens, new.slot_ids, new.starts, new.tokens, new.counts)
        tokens, lengths = self.history.tokens.index_select(0, new.slot_ids), new.ends
        starts = matches(tokens, lengths, self._max_ngram, self._min_ngram)
        found = continuations(tokens, lengths, starts, self.num_draft_tokens)
        return LookedUpTree(merge(found, self._topk, self._num_rows))


def matches(tokens: torch.Tensor, lengths: torch.Tensor, max_ngram: int, min_ngram: int) -> torch.Tensor:
    """Return the positions [batch, matches] after earlier occurrences of the last `max_ngram` to `min_ngram` tokens.

    The longest matches come first, and of equally long ones the latest; missing matches are -1.

    Args:
        tokens: [batch, capacity]; lengths: [batch] known tokens of each row.
    """
    capacity = tokens.shape[1]
    lengths = lengths.unsqueeze(1)
    ends = torch.arange(capacity, device=tokens.device)
    goes_on = ends < lengths
    longest = torch.zeros_like(tokens)
    for back in range(1, min(max_ngram, capacity - 1) + 1):
        # The text's own token to compare is at `lengths` - `back`, if the text has that many tokens.
        own = tokens.gather(1, (lengths - back).clamp(min=0, max=capacity - 1))
        same = torch.zeros_like(goes_on)
        same[:, back:] = tokens[:, : capacity - back] == own
        goes_on = goes_on & same & (lengths >= back)
        longest = longest + goes_on
    order = torch.where(longest >= min_ngram, longest * capacity + ends, -1)
    best = order.topk(min(NUM_MATCHES, capacity), dim=1)
    return torch.where(best.values >= 0, best.indices, -1)


def continuations(tokens: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor, depth: int) -> Continuations:
    """Read `depth` tokens from each position in `starts` [batch, matches]."""
    positions = starts.unsqueeze(2) + torch.arange(depth, device=starts.device)
    known = (starts.unsqueeze(2) >= 0) & (positions < lengths.view(-1, 1, 1))
    inside = positions.clamp(0, tokens.shape[1] - 1).flatten(1)
    return Continuations(tokens.gather(1, inside).view_as(positions), known)


def merge(found: Continuations, topk: int, num_rows: int) -> DraftTree:
    """Merge continuations with equal beginnings, and keep the `num_rows` - 1 best drafts.

    The drafts of the best match, which are the chain's, are best. Then come the most frequent. The `topk` best drafts
    of each level go on.
    """
    batch, num_matches, depth = found.tokens.shape
    drafts = (found.tokens.unsqueeze(2) == found.tokens.unsqueeze(1)) & found.known.unsqueeze(1)
    shared = (drafts & found.known.unsqueeze(2)).cummin(dim=3).values
    # The first of all matches with the same beginning represents them.
    leaders = shared.int().argmax(dim=2)
    numbers = torch.arange(num_matches, device=leaders.device)
    stands = found.known & (leaders == numbers.unsqueeze(1))
    on_spine = (numbers == 0).unsqueeze(1)
    scores = (shared.sum(dim=2) + on_spine * num_matches) * num_matches - numbers.unsqueeze(1)

    goes_on = torch.ones_like(stands[:, :, 0])
    pool = []
    for level in range(depth):
        parents = leaders[:, :, level - 1] if level > 0 else numbers.expand(batch, -1)
        there = stands[:, :, level] & goes_on.gather(1, parents)
        pool.append(torch.where(there, scores[:, :, level], _NONE))
        better = pool[-1].unsqueeze(1) > pool[-1].unsqueeze(2)
        goes_on = there & (better.sum(dim=2) < topk)
    return _rows(found.tokens, leaders, torch.stack(pool, dim=2), num_rows)


_NONE = -(2**40)


def _rows(tokens: torch.Tensor, leaders: torch.Tensor, scores: torch.Tensor, num_rows: int) -> DraftTree:
    """Assign rows to the best drafts of [batch, matches, depth], best first; the remaining rows hold no draft."""
    batch, _, depth = tokens.shape
    flat = scores.flatten(1)
    # Padding, so that there are always enough candidates for all rows.
    flat = torch.cat((flat, flat.new_full((batch, num_rows - 1), _NONE)), dim=1)
    best = flat.sort(dim=1, descending=True, stable=True)
    is_draft = best.values[:, : num_rows - 1] > _NONE
    places = torch.where(is_draft, best.indices[:, : num_rows - 1], 0)
    rows = torch.arange(1, num_rows, device=tokens.device).expand_as(places)
    row_of = torch.zeros_like(flat).scatter(1, torch.where(is_draft, places, flat.shape[1] - 1), rows)
    level = places % depth
    parent_leader = leaders.flatten(1).gather(1, (places - 1).clamp(min=0))
    parents = torch.where(level > 0, row_of.gather(1, parent_leader * depth + (level - 1).clamp(min=0)), 0)
    parents = torch.where(is_draft, parents, rows)
    of_rows = torch.where(is_draft, tokens.flatten(1).gather(1, places), 0)
    return DraftTree(of_rows, torch.cat((torch.zeros_like(parents[:, :1]), parents), dim=1))
