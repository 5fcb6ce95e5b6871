"""The kernels of a tree's round, each against its reference: the walks, and the path that becomes a chain."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from spec_kernels.tree_path import move_path
from spec_kernels.tree_reference import (
    move_path_reference,
)
from spec_kernels.tree_walk import follow_tree
from spec_kernels.utils import INTERPRETED
from spec_lab.options.acceptance.imposed import Synthetic
from spec_lab.options.acceptance.lossless import Rejection, Strict
from spec_lab.options.trees import DynamicTreeConfig
from tests.graph_lab import MODES, SAMPLED, Lab, Rule, make_lab, mixed_requests
from tests.kernel_lab import DEVICE, LaunchedKernels, randn


def test_siblings_with_one_token_give_the_first_of_them() -> None:
    parents = torch.tensor([[0, 0, 0, 1, 2, 2]], device=DEVICE)
    drafts = torch.tensor([[9, 4, 4, 5, 5, 5]], device=DEVICE)
    chosen = torch.tensor([[4, 5, 5, 5, 5, 5]], device=DEVICE)
    logits = torch.nn.functional.one_hot(chosen, 10).float()
    _, num_emitted, path = follow_tree(logits, drafts, parents, torch.ones(1, dtype=torch.bool, device=DEVICE), 2)
    assert path.tolist() == [[0, 1, 3]] and num_emitted.tolist() == [3]


def paths_of_trees(batch: int, num_rows: int, depth: int) -> torch.Tensor:
    """Paths of every kind: increasing rows, and behind their ends the rows stay where they are."""
    draw, columns = random.Random(1), range(depth + 1)
    paths = []
    for _ in range(batch):
        length = draw.randint(0, min(depth, num_rows - 1))
        path = [0, *sorted(draw.sample(range(1, num_rows), length))]
        paths.append([path[column] if column <= length else min(column, num_rows - 1) for column in columns])
    return torch.tensor(paths, device=DEVICE)


ONE, TWO = ((2, 3, 8),), ((2, 1, 700), (24,))


@pytest.mark.parametrize(
    ("shapes", "batch", "num_rows", "depth", "page_size"),
    [(ONE, 6, 9, 3, 4), (TWO, 3, 33, 16, 1), (ONE, 4, 4, 5, 16)],
    ids=["one", "two", "shallow"],
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
    "strict": (Rule(Strict()), "follow_argmax"),
    "synthetic": (Rule(Synthetic(rates=[0.8, 0.5, 0.3])), "impose_path"),
    "one_hot": (Rule(Rejection(method="one_hot"), SAMPLED), "draw_rows"),
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp, DEVICE.type)


QUICK = [("synthetic", "frozen_kv", "full_loop")]  # strict, with eagle3: test_triton_tree_attention.py
ON_A_GPU = [
    ("strict", "eagle3", "overlap"),
    ("one_hot", "frozen_kv", "round"),
    ("strict", "mtp_eagle", "full_loop"),
    ("synthetic", "eagle3", "round"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "drafter", "mode"), QUICK if INTERPRETED else [*QUICK, *ON_A_GPU])
def test_whole_requests_are_those_of_torch(lab: Lab, rule: str, drafter: str, mode: str) -> None:
    """Captured rounds of two requests, beside eager ones of torch."""
    requests, (of_rule, walk) = mixed_requests(2, 4, seed=1), RULES[rule]
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
