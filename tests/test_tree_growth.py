"""How trees grow: against EAGLE-2 written with lists, and against the paths that were asked for."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from spec_kernels.tree_reference import rank_tokens_reference
from spec_lab.core.draft_paths import DraftPaths
from spec_lab.core.draft_tree import DraftTree
from spec_lab.drafters.growth import DynamicTree, StaticTree, TreeShape
from spec_lab.drafters.siblings import Ranked, empty_ranks
from tests.drafted_rows import no_rows

VOCAB = 6
Path = tuple[int, ...]


def rank_tokens(logits: torch.Tensor, topk: int) -> Ranked:
    """Find the `topk` likeliest tokens of [batch, branches, vocab] logits, of equal ones the lowest id first."""
    ranked = empty_ranks(logits, (*logits.shape[:2], topk))
    rank_tokens_reference(ranked.tokens, ranked.log_probs, logits, None)
    return ranked


def table_of(seed: int, ties: bool) -> dict[Path, torch.Tensor]:
    """Logits [vocab] after every path of up to 4 tokens; with ties they are whole numbers."""
    generator = torch.Generator().manual_seed(seed)
    paths = [path for length in range(5) for path in product(range(VOCAB), repeat=length)]
    rows = {path: torch.randn(VOCAB, generator=generator) * 2 for path in paths}
    return {path: row.round() if ties else row for path, row in rows.items()}


def grow(shape: TreeShape, tables: list[dict[Path, torch.Tensor]]) -> DraftTree:
    """The tree of a batch of drafters, each of which looks its logits up by the path from the root."""
    paths: list[list[Path]] = [[()] for _ in tables]

    def ranked() -> Ranked:
        rows = [torch.stack([table[path] for path in of]) for table, of in zip(tables, paths, strict=True)]
        return rank_tokens(torch.stack(rows), shape.topk)

    growth = shape.start(ranked(), no_rows(len(tables)))
    for _ in range(1, shape.depth):
        before = torch.arange(len(paths[0]), dtype=torch.float32).view(1, -1, 1).expand(len(tables), -1, 1)
        branches = shape.branch(growth, before)
        assert branches.hidden.view_as(branches.came_from).long().equal(branches.came_from)
        paths = [
            [(*before[parent], token) for parent, token in zip(parents, tokens, strict=True)]
            for before, parents, tokens in zip(
                paths, branches.came_from.tolist(), branches.tokens.tolist(), strict=True
            )
        ]
        shape.add(growth, ranked())
    return shape.finish(growth)


def paths_of(tree: DraftTree, index: int) -> list[Path]:
    """The path of tokens to every draft, in the order of the rows; a parent stands before its children."""
    found: list[Path] = [()]
    for row, (token, parent) in enumerate(
        zip(tree.tokens[index].tolist(), tree.parents[index, 1:].tolist(), strict=True), start=1
    ):
        assert 0 <= parent < row
        found.append((*found[parent], token))
    return found[1:]


def slow_eagle2(table: dict[Path, torch.Tensor], topk: int, depth: int, num_drafts: int) -> set[Path]:
    """EAGLE-2 by its description: expand the best of each level, then keep the best of all."""
    pool: list[tuple[float, Path]] = []
    level: list[tuple[float, Path]] = [(0.0, ())]
    for _ in range(depth):
        below = [
            (score + float(table[path].log_softmax(0)[token]), (*path, int(token)))
            for score, path in level
            for token in table[path].sort(descending=True, stable=True).indices[:topk]
        ]
        pool += below
        level = sorted(below, key=lambda scored: -scored[0])[:topk]
    return {path for _, path in sorted(pool, key=lambda scored: -scored[0])[:num_drafts]}


@pytest.mark.parametrize(("topk", "depth", "num_rows"), [(1, 3, 4), (2, 4, 9), (3, 3, 12), (4, 2, 20), (3, 1, 4)])
def test_a_dynamic_tree_is_that_of_eagle2(topk: int, depth: int, num_rows: int) -> None:
    tables = [table_of(seed, ties=False) for seed in range(4)]
    tree = grow(DynamicTree(depth, num_rows, topk), tables)
    assert tree.tokens.shape == (4, num_rows - 1) and tree.parents.shape == (4, num_rows)
    for index, table in enumerate(tables):
        paths = paths_of(tree, index)
        assert len(set(paths)) == num_rows - 1, "siblings differ"
        assert set(paths) == slow_eagle2(table, topk, depth, num_rows - 1)


def test_ties_leave_no_draft_without_its_parent() -> None:
    """Equal scores, and drafts as likely as their parents, which a certain drafter makes."""
    certain = {path: torch.tensor([0.0, 300.0, 0, 0, 0, 0]) for path in table_of(0, ties=True)}
    tree = grow(DynamicTree(4, 12, 3), [table_of(1, ties=True), certain])
    for index in range(2):
        paths = paths_of(tree, index)
        assert len(set(paths)) == 11
    assert (1, 1, 1, 1) in paths


@pytest.mark.parametrize(
    "ranks", [[[1], [0, 2], [0], [0, 0, 1], [0, 0], [2], [2, 1]], [[0], [0, 0], [0, 0, 0]], [[0], [1], [0, 0], [1, 1]]]
)
def test_a_static_tree_has_the_ranks_of_its_paths(ranks: list[list[int]]) -> None:
    tables = [table_of(seed, ties=False) for seed in range(3)]
    tree = grow(StaticTree(DraftPaths(ranks), torch.device("cpu")), tables)
    for index, table in enumerate(tables):
        expected = set()
        for path in ranks:
            tokens: Path = ()
            for rank in path:
                tokens = (*tokens, int(table[tokens].sort(descending=True, stable=True).indices[rank]))
            expected.add(tokens)
        assert set(paths_of(tree, index)) == expected
