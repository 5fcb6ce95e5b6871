"""Prompt lookup as a tree, against the trie by hand; on one match it is the chain that prompt lookup drafts."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_lab.core.draft_tree import DraftTree
from spec_lab.drafters.history import NewTokens, TokenHistory
from spec_lab.drafters.ngram_tree import NUM_MATCHES, NgramTreeDrafter, matches
from tests.test_lookup_drafters import CPU, slow_drafts

Path = tuple[int, ...]


def paths_of(tree: DraftTree, index: int) -> list[Path]:
    """The path of tokens to every row that holds a draft; rows without one come last, each below itself."""
    tokens, parents = tree.tokens[index].tolist(), tree.parents[index].tolist()
    assert parents[0] == 0
    found: dict[int, Path] = {0: ()}
    for row, (token, parent) in enumerate(zip(tokens, parents[1:], strict=True), start=1):
        if parent == row:
            assert token == 0
        else:
            assert parent < row and row - 1 in found, "parents first, empty rows last"
            found[row] = (*found[parent], token)
    return list(found.values())[1:]


def slow_matches(text: list[int], max_ngram: int, min_ngram: int) -> list[int]:
    """Where the longest suffixes occurred before, the longest first, of equal ones the latest."""
    found = []
    for end in range(1, len(text)):
        size = 0
        while size < min(max_ngram, end) and text[end - size - 1] == text[len(text) - size - 1]:
            size += 1
        if size >= min_ngram:
            found.append((-size, -end))
    return [-end for _, end in sorted(found)[:NUM_MATCHES]]


def slow_tree(text: list[int], depth: int, num_rows: int, topk: int, sizes: tuple[int, int]) -> set[Path]:
    """The paths of the trie, by its description: those that most continuations share, the first one's always."""
    texts = [tuple(text[start : start + depth]) for start in slow_matches(text, *sizes)]
    shared = Counter(beginning[:length] for beginning in texts for length in range(1, len(beginning) + 1))
    first = {path: next(i for i, whole in enumerate(texts) if whole[: len(path)] == path) for path in shared}

    def value(path: Path) -> tuple[bool, int, int, int]:
        return first[path] > 0, -shared[path], first[path], len(path)

    going_on: set[Path] = {()}
    pool: list[Path] = []
    for length in range(1, depth + 1):
        level = sorted((path for path in shared if len(path) == length and path[:-1] in going_on), key=value)
        pool += level
        going_on = set(level[:topk])
    return set(sorted(pool, key=value)[: num_rows - 1])


@settings(max_examples=150, deadline=None)
def nothing_new(slot_ids: torch.Tensor, lengths: torch.Tensor) -> NewTokens:
    return NewTokens(slot_ids, lengths, torch.zeros_like(lengths).unsqueeze(1), torch.zeros_like(lengths))


@given(
    texts=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=40), min_size=1, max_size=3),
    shape=st.sampled_from([(3, 9, 2), (1, 4, 4), (4, 16, 3), (5, 4, 1), (2, 2, 2), (3, 33, 16)]),
    sizes=st.sampled_from([(4, 2), (1, 1), (9, 3), (2, 1)]),
)
def test_the_tree_is_the_trie_by_hand(
    texts: list[list[int]], shape: tuple[int, int, int], sizes: tuple[int, int]
) -> None:
    """Behind the text stands junk, which an earlier request has left."""
    depth, num_rows, topk = shape
    history = TokenHistory(len(texts), 64, CPU)
    history.tokens.fill_(2)
    for slot, text in enumerate(texts):
        history.tokens[slot, : len(text)] = torch.tensor(text)
    drafter = NgramTreeDrafter(depth, num_rows, topk, *sizes, history)
    lengths = torch.tensor([len(text) for text in texts])
    found = matches(history.tokens[:-1], lengths, *sizes)
    tree = drafter.finish(drafter.propose(nothing_new(torch.arange(len(texts)), lengths)))
    assert tree.tokens.shape == (len(texts), num_rows - 1) and tree.parents.shape == (len(texts), num_rows)
    for index, text in enumerate(texts):
        assert [start for start in found[index].tolist() if start >= 0] == slow_matches(text, *sizes)
        paths = paths_of(tree, index)
        assert len(set(paths)) == len(paths), "siblings differ"
        assert set(paths) == slow_tree(text, depth, num_rows, topk, sizes)
        spine = slow_drafts(text, depth, *sizes)
        known = next((spine[:length] for length in range(depth, 0, -1) if tuple(spine[:length]) in paths), [])
        assert len(known) == min(num_rows - 1, spine.index(0) if 0 in spine else depth), "the chain is in it"
