"""The kernels of a tree's round, each against its reference: the walks, and the path that becomes a chain."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from spec_kernels.noise_reference import Use, round_key, uniform
from spec_kernels.tree_draw import draw_rows, draw_rows_reference
from spec_kernels.tree_path import move_path
from spec_kernels.tree_reference import (
    depths_reference,
    follow_reference,
    impose_reference,
    move_path_reference,
)
from spec_kernels.tree_walk import follow_argmax, follow_chosen, impose_path
from spec_kernels.utils import INTERPRETED
from spec_kernels.vocabulary import VOCAB_TILE
from spec_lab.core.draft_tree import ancestors_and_self
from spec_lab.options.rules.rejection import RejectionConfig
from spec_lab.options.rules.strict import StrictAcceptanceConfig
from spec_lab.options.rules.synthetic import SyntheticConfig
from spec_lab.options.trees.dynamic import DynamicTreeConfig
from tests.graph_lab import MODES, SAMPLED, Lab, Rule, make_lab, mixed_requests
from tests.kernel_lab import DEVICE, DTYPES, randn
from tests.test_kernels_wiring import LaunchedKernels

SIZES = [
    (5, 9, 3, 11),
    *(
        pytest.param(sizes, marks=pytest.mark.slow)
        for sizes in [(3, 2, 1, 40), (2, 16, 3, 2 * VOCAB_TILE + 7), (1, 64, 5, 30), (6, 4, 6, 8)]
    ),
]
"""Trees a batch, rows, levels, tokens; the last have fewer rows than columns."""


def draw_trees(batch: int, num_rows: int, depth: int) -> torch.Tensor:
    """Parents [batch, N] of trees at most `depth` deep; some rows hold no draft."""
    draw, trees = random.Random(num_rows), []
    for _ in range(batch):
        parents, depths = [0], [0]
        for row in range(1, num_rows):
            below = [other for other in range(row) if depths[other] < depth and (not other or parents[other] != other)]
            parent = draw.choice(below) if draw.random() < 0.9 else row
            parents.append(parent)
            depths.append(0 if parent == row else depths[parent] + 1)
        trees.append(parents)
    return torch.tensor(trees, device=DEVICE)


def draw_tokens(parents: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Drafts of which about two in three are what the target chose behind their parents."""
    right = best.gather(1, parents)
    is_right = randn(*parents.shape, seed=3) > -0.4
    return torch.where(is_right, right, (right + 1) % 7)


def empty_outcome(batch: int, depth: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, path = (torch.full((batch, depth + 1), -7, device=DEVICE) for _ in range(2))
    return tokens, torch.full((batch,), -7, device=DEVICE), path


def assert_all_equal(got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    assert all(torch.equal(left, right) for left, right in zip(got, expected, strict=True))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", DTYPES[:1] if len(DTYPES) == 2 else DTYPES)
def test_it_follows_the_argmax_where_the_reference_does(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Whole numbers as logits, so that ties are everywhere; rows of a larger tensor; one request is inactive."""
    batch, num_rows, depth, vocab_size = sizes
    logits = randn(batch, num_rows, vocab_size).round().to(dtype)
    parents = draw_trees(batch, num_rows, depth)
    drafts = draw_tokens(parents, logits.argmax(dim=-1))
    active = torch.arange(batch, device=DEVICE) != 1
    wide = torch.cat((drafts, drafts), dim=1)[:, :num_rows]
    got, again = empty_outcome(batch, depth), empty_outcome(batch, depth)
    follow_argmax(*got, logits, wide, parents, active)
    expected = follow_reference(logits.argmax(dim=-1), drafts, parents, active, depth)
    assert_all_equal(got, expected)
    follow_chosen(*again, logits.argmax(dim=-1), drafts, parents, active)
    assert_all_equal(again, expected)
    if batch == 5:
        assert len(set(got[1].tolist())) > 2, "paths of several lengths"


def test_siblings_with_one_token_give_the_first_of_them() -> None:
    parents = torch.tensor([[0, 0, 0, 1, 2, 2]], device=DEVICE)
    drafts = torch.tensor([[9, 4, 4, 5, 5, 5]], device=DEVICE)
    chosen = torch.tensor([[4, 5, 5, 5, 5, 5]], device=DEVICE)
    got = empty_outcome(1, 2)
    follow_chosen(*got, chosen, drafts, parents, torch.ones(1, dtype=torch.bool, device=DEVICE))
    assert got[2].tolist() == [[0, 1, 3]] and got[1].tolist() == [3]


@pytest.mark.parametrize("sizes", SIZES)
def test_it_imposes_what_the_reference_does(sizes: tuple[int, ...]) -> None:
    _, num_rows, depth, vocab_size = sizes
    batch = 9 if vocab_size < VOCAB_TILE else 2
    logits = randn(batch, num_rows, vocab_size).round()
    parents = draw_trees(batch, num_rows, depth)
    drafts = draw_tokens(parents, logits.argmax(dim=-1))
    rates = torch.tensor([0.9 - 0.8 * level / depth for level in range(depth)], dtype=torch.float64, device=DEVICE)
    rows = torch.arange(batch, device=DEVICE)
    active, slot_ids, seeds, kv_lens = rows != 1, batch - rows, torch.arange(batch + 1, device=DEVICE) * 12345, 3 * rows
    got = empty_outcome(batch, depth)
    impose_path(*got, logits, drafts, parents, active, rates, slot_ids, seeds, kv_lens)
    draws = uniform(round_key(seeds[slot_ids], kv_lens, 0, Use.SYNTHETIC)).unsqueeze(1)
    imposed = (draws < rates).sum(dim=1, keepdim=True)
    assert_all_equal(got, impose_reference(imposed, logits.argmax(dim=-1), drafts, parents, active, depth))
    visible = ancestors_and_self(parents, depth)
    assert torch.equal(depths_reference(parents, depth), visible.sum(dim=2) - 1)
    for tree, path, count in zip(visible, got[2], got[1].tolist(), strict=True):
        assert all(tree[path[count - 1], row] for row in path[:count]) or count == 0


def paths_of_trees(batch: int, num_rows: int, depth: int) -> torch.Tensor:
    """Paths of every kind: increasing rows, and behind their ends the rows stay where they are."""
    draw, columns = random.Random(1), range(depth + 1)
    paths = []
    for _ in range(batch):
        length = draw.randint(0, min(depth, num_rows - 1))
        path = [0, *sorted(draw.sample(range(1, num_rows), length))]
        paths.append([path[column] if column <= length else min(column, num_rows - 1) for column in columns])
    return torch.tensor(paths, device=DEVICE)


@pytest.mark.parametrize(
    "shapes", [((2, 3, 8),), pytest.param(((2, 1, 700), (24,)), marks=pytest.mark.slow)], ids=["one", "two"]
)
@pytest.mark.parametrize(
    ("batch", "num_rows", "depth", "page_size"),
    [(6, 9, 3, 4), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(3, 33, 16, 1), (4, 4, 5, 16)])],
)
def test_a_path_becomes_a_chain(
    shapes: tuple[tuple[int, ...], ...], batch: int, num_rows: int, depth: int, page_size: int
) -> None:
    """Two kinds of layers and one, wide rows and narrow ones, pages crossed, sources that are other rows' targets, and
    positions past the end of the table, whose junk goes to the scratch page."""
    num_columns = 64 // page_size + 1
    pages = torch.randperm(batch * num_columns).view(batch, -1) + 2
    pages[:, -1] = 1
    page_table, path = pages.to(DEVICE), paths_of_trees(batch, num_rows, depth)
    kv_lens = torch.tensor([0, 5, 17, 30, 3, 60][:batch], device=DEVICE)
    if batch == 6:
        path[5] = torch.arange(depth + 1).clamp(max=num_rows - 1)
    num_slots = (batch * num_columns + 2) * page_size
    caches = [randn(3 - index, num_slots, *shape, seed=index) for index, shape in enumerate(shapes)]
    copies = [cache.clone() for cache in caches]
    features = randn(batch * num_rows, 40, seed=5)[:, :33]
    outcomes = []
    for function, tensors in ((move_path, caches), (move_path_reference, copies)):
        moved = torch.full((batch * (depth + 1), 33), -7.0, device=DEVICE)
        function(tensors, moved, features, path, kv_lens, page_table, page_size)
        outcomes.append(moved)
    assert torch.equal(*outcomes)
    scratch = slice(page_size, 2 * page_size)
    for got, expected in zip(caches, copies, strict=True):
        got[:, scratch] = expected[:, scratch] = 0
        assert torch.equal(got, expected)
    move_path(caches, None, None, path * 0 + torch.arange(depth + 1, device=DEVICE), kv_lens, page_table, page_size)
    assert all(torch.equal(got, expected) for got, expected in zip(caches, copies, strict=True)), "a chain stays"


RULES = {
    "strict": (Rule(StrictAcceptanceConfig()), "follow_argmax"),
    "synthetic": (Rule(SyntheticConfig(mean_length=None, rates=[0.8, 0.5, 0.3])), "impose_path"),
    "one_hot": (Rule(RejectionConfig(method="one_hot"), SAMPLED), "draw_rows"),
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp, DEVICE.type)


QUICK = [("strict", "eagle3", "overlap"), ("synthetic", "frozen_kv", "full_loop")]
ON_A_GPU = [("one_hot", "frozen_kv", "round"), ("strict", "mtp_eagle", "full_loop"), ("synthetic", "eagle3", "round")]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "drafter", "mode"), QUICK if INTERPRETED else [*QUICK, *ON_A_GPU])
def test_whole_requests_are_those_of_torch(lab: Lab, rule: str, drafter: str, mode: str) -> None:
    """Captured rounds of two requests, beside eager ones of torch."""
    requests, (of_rule, walk) = mixed_requests(2, 6), RULES[rule]
    results = []
    for kernels, graph in (("torch", None), ("triton", MODES[mode])):
        tree = DynamicTreeConfig(topk=3, num_rows=9)
        options: dict[str, Any] = {"rule": of_rule, "batch_size": 2, "tree": tree, "kernels": kernels}
        with LaunchedKernels() as launched:
            result = lab.engine(requests, graph, drafter, **options).generate(requests)
        results.append([(r.output_ids, r.accepted_per_round) for r in result.requests])
    assert results[0] == results[1]
    assert {walk, "move_path", "rank_tokens", "choose_branches", "choose_rows"} <= launched.names
    assert rule == "one_hot" or len({count for _, accepted in results[0] for count in accepted}) > 1


@pytest.mark.parametrize("sizes", [(5, 4, 300), pytest.param((2, 16, 2500), marks=pytest.mark.slow)])
def test_it_draws_what_the_reference_does(sizes: tuple[int, int, int]) -> None:
    """Requests of several slots and lengths; some tokens cannot be."""
    batch = sizes[0]
    logits = 3 * randn(*sizes)
    logits[:, :, ::7] = float("-inf")
    rows = torch.arange(batch, device=DEVICE)
    parts = batch - rows, torch.arange(batch + 1, device=DEVICE) * 12345, 3 * rows + 1, 0.7
    got, expected = torch.full((2, *sizes[:2]), -7, device=DEVICE)
    draw_rows(got, logits, *parts)
    draw_rows_reference(expected, logits, *parts)
    assert torch.equal(got, expected)
    assert len(set(got.flatten().tolist())) > 10
