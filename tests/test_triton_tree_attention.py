"""Attention from the rows of a tree: the mask over the newest keys, and the chain's bits where the tree is a chain."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.attention.torch_tree import TorchTreeAttention
from spec_lab.attention.triton_backend import TritonAttention
from spec_lab.config.choices import KernelsChoice
from spec_lab.config.run import CacheConfig
from spec_lab.core.draft_tree import TreeRows, climb
from spec_lab.core.kv_cache import LayerCache, cache_slots
from spec_lab.core.types import AttentionMetadata
from spec_lab.options.trees import DynamicTreeConfig
from tests.covering import each_value
from tests.kernel_lab import DEVICE, DTYPES, assert_near, randn
from tests.lab import Reference, generate, make_config, make_pair, part, random_requests
from tests.test_triton_attention import SPLIT, Paged, attend, fill, reference, set_tiles_to_fill


def tree_rows(paged: Paged, parents: list[list[int]], num_before: int = 0) -> TreeRows:
    """Make the rows of trees by their parents; the first `num_before` only write, as branches of earlier levels. What
    stands behind a row in its path is a slot of NaN.
    """
    num_rows = len(parents[0])
    paths, depths = climb(torch.tensor(parents, device=DEVICE), num_rows - 1)
    paths = paths[:, :, : int(depths.max()) + 1]
    places = (paged.seq_lens - num_rows).unsqueeze(1) + torch.arange(num_rows, device=DEVICE)
    slots = cache_slots(paged.page_table, places, paged.page_size)
    path_slots = slots.gather(1, paths.flatten(1)).view_as(paths)
    path_slots[torch.arange(paths.shape[2], device=DEVICE) > depths.unsqueeze(2)] = 0
    return TreeRows(path_slots[:, num_before:].contiguous(), depths[:, num_before:].contiguous(), num_rows)


def random_parents(num_rows: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [0] + [draw.randrange(row) for row in range(1, num_rows)]


@pytest.mark.parametrize(("shape", "dtype"), each_value([(4, 7, 30), (16, 2, None), (4, 4, None), (32, 1, 66)], DTYPES))
def test_a_tree_that_is_a_chain_gives_the_bits_of_the_chain(
    shape: tuple[int, int, int | None], dtype: torch.dtype
) -> None:
    """Cells that nobody sees are NaN."""
    num_rows, group, window = shape
    paged = fill([num_rows + 1, 64 + num_rows // 2, 150], num_kv_heads=1, head_dim=64, dtype=dtype)
    queries = randn(3 * num_rows, group, 64, seed=1, dtype=dtype)
    chain = [max(0, row - 1) for row in range(num_rows)]
    tree = tree_rows(paged, [chain] * 3)
    assert torch.equal(attend(paged, queries, window, tree=tree), attend(paged, queries, window))


@pytest.mark.parametrize(
    ("shape", "dtype", "split", "is_narrow"),
    [
        ((4, 3, None), DTYPES[-1], SPLIT, False),
        ((8, 7, 3), torch.float32, SPLIT, False),
        ((16, 4, None), DTYPES[-1], SPLIT, False),
        ((40, 2, 30), DTYPES[-1], SPLIT, False),
        ((5, 4, None), DTYPES[-1], 2 * SPLIT, False),
        ((16, 4, 30), DTYPES[-1], 2 * SPLIT, True),
    ],
)
def test_a_row_has_the_bits_of_the_chain_that_leads_to_it(
    shape: tuple[int, int, int | None], dtype: torch.dtype, split: int, is_narrow: bool
) -> None:
    """Prefixes end in the middle of a tile of keys, one key before its end, and on it; one is empty. A split is one
    tile, or two, as in long contexts.
    """
    num_rows, group, window = shape
    prefixes = [0, 100, 63, 128] if num_rows < 16 else [63, 128]
    batch = len(prefixes)
    paged = fill([length + num_rows for length in prefixes], num_kv_heads=1, head_dim=64, dtype=dtype)
    paged = paged.narrowed() if is_narrow else paged
    queries = randn(batch * num_rows, group, 64, seed=1, dtype=dtype)
    tree = tree_rows(paged, [random_parents(num_rows, seed) for seed in range(batch)])
    found = attend(paged, queries, window, split=split, tree=tree).view(batch, num_rows, -1)
    for request, prefix in enumerate(prefixes):
        for row in range(0, num_rows, 1 if num_rows < 16 else 3):
            chain, depth = along_path(paged, tree, request, row), int(tree.depths[request, row])
            chain.seq_lens = torch.tensor([prefix + depth + 1], device=DEVICE)
            query = queries.view(batch, num_rows, group, 64)[request, row : row + 1]
            assert torch.equal(attend(chain, query, window, split=split)[0], found[request, row])


def along_path(paged: Paged, tree: TreeRows, request: int, row: int) -> Paged:
    """Make the cache of one request, whose newest keys are those of a path, one behind the other."""
    chain = replace(paged, kv=paged.kv.clone(), page_table=paged.page_table[[request]])
    path = tree.path_slots[request, row, : int(tree.depths[request, row]) + 1]
    prefix = int(paged.seq_lens[request]) - tree.num_tail
    positions = prefix + torch.arange(len(path), device=DEVICE)
    places = chain.page_table[0, positions // 16] * 16 + positions % 16
    chain.kv.view(torch.uint8)[places] = paged.kv.view(torch.uint8)[path]  # torch copies no e4m3 by index
    if paged.powers is not None:
        chain.powers = paged.powers.clone()
        chain.powers[places] = paged.powers[path]
    return chain


@pytest.mark.parametrize(("num_rows", "window"), each_value([5, 24], [None, 3, 70]))
def test_a_tree_equals_the_backend_of_torch(num_rows: int, window: int | None) -> None:
    """Trees differ between requests, end on and beside split borders, and one has no keys before it."""
    paged = fill([num_rows, 64 + num_rows // 2, 128])
    tree = tree_rows(paged, [random_parents(num_rows, seed) for seed in range(3)])
    queries = randn(3 * num_rows, 4, 16, seed=1)
    assert_near(attend(paged, queries, window, tree=tree), reference(paged, queries, window, tree))


def test_rows_of_a_new_level_see_earlier_rows_of_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft's newest branches are fewer than the newest keys; and one program may take all splits of a tile."""
    paged = fill([70, 20])
    tree = tree_rows(paged, [random_parents(9, 1), random_parents(9, 2)], num_before=6)
    queries = randn(2 * 3, 4, 16, seed=1)
    for window in (None, 3):
        shared = attend(paged, queries, window, tree=tree)
        assert_near(shared, reference(paged, queries, window, tree))
        with monkeypatch.context() as many_tiles:
            set_tiles_to_fill(many_tiles, 0)
            assert torch.equal(attend(paged, queries, window, tree=tree), shared)


def as_seen(metadata: AttentionMetadata, page_size: int) -> list[Any]:
    """Tell where rows stand, and which slots each sees behind the prefix."""
    rows = metadata.tree
    assert rows is not None
    paths = zip(rows.path_slots.flatten(0, 1).tolist(), rows.depths.flatten().tolist(), strict=True)
    seen = [path[: depth + 1] for path, depth in paths]
    return [metadata.positions.tolist(), metadata.slot_mapping.tolist(), metadata.seq_lens.tolist(), seen]


@pytest.mark.parametrize("lens", [(32, 1), (0, 61, 200)])
def test_the_backend_places_a_tree_as_the_one_in_torch(lens: tuple[int, ...]) -> None:
    """With rows that hold no draft, over page borders, and past the end of the cache; attention of both agrees."""
    page_size, num_rows, batch = 4, 6, len(lens)
    paged = fill([min(length, 56) + num_rows for length in lens], page_size=page_size, garbage=0.0)
    prefixes = torch.tensor(lens, device=DEVICE)
    trees = [[0, 0, 1, 1, 3, 5], [0, 1, 0, 2, 0, 4], [0, 0, 1, 2, 3, 4]][:batch]
    parents = torch.tensor(trees, device=DEVICE)
    backends = TritonAttention(page_size, 64), TorchTreeAttention(page_size, 64)
    built = [of.build_tree(parents, 5, prefixes, paged.page_table, max(lens) + num_rows) for of in backends]
    assert as_seen(built[0], page_size) == as_seen(built[1], page_size)
    assert built[0].positions.view(batch, -1)[0].tolist() == [min(lens[0] + d, 63) for d in (0, 1, 2, 2, 3, 0)]
    if max(lens) < 60:
        queries = randn(batch * num_rows, 4, 16, seed=1)
        outputs = [
            of.attend(queries, LayerCache(paged.kv), metadata, 3, 0.25)
            for of, metadata in zip(backends, built, strict=True)
        ]
        assert_near(*outputs)


def test_the_backend_places_branches_as_the_one_in_torch() -> None:
    """Over levels of other widths; which branch the last came from is a view of the same memory for all requests."""
    lens = torch.tensor([30, 3], device=DEVICE)
    paged = fill([30 + 9, 3 + 9], page_size=4, garbage=0.0)
    levels = [
        torch.zeros((2, 3), dtype=torch.int64, device=DEVICE),
        torch.tensor([[2, 2], [0, 1]], device=DEVICE),
        torch.tensor([1, 0, 1, 1], device=DEVICE).expand(2, -1),
    ]
    before: list[Any] = [None, None]
    backends = TritonAttention(4, 64), TorchTreeAttention(4, 64)
    queries = randn(2 * 4, 4, 16, seed=1)
    for came_from in levels:
        built = [
            of.build_branches(rows, came_from, lens, paged.page_table, 30 + 9)
            for of, rows in zip(backends, before, strict=True)
        ]
        before = [metadata.tree for metadata in built]
        assert as_seen(built[0], 4) == as_seen(built[1], 4)
        outputs = [
            of.attend(queries[: came_from.numel()], LayerCache(paged.kv), metadata, None, 0.25)
            for of, metadata in zip(backends, built, strict=True)
        ]
        assert_near(*outputs)
    assert built[0].positions.tolist() == [32] * 4 + [5] * 4 and built[0].seq_lens.tolist() == [39, 12]


@pytest.mark.parametrize(("num_rows", "num_requests"), [(6, 1), (3, 2)])
def test_an_engine_with_a_tree_gives_the_tokens_of_the_torch_backend(
    tmp_path: Path, num_rows: int, num_requests: int
) -> None:
    """EAGLE-3 writes keys for its branches, over several levels; the target has a window in half of its layers. Three
    rows are fewer than the tree may be deep."""
    window = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
    pair = make_pair(tmp_path, "qwen2", vocab_size=24, **window)
    requests = random_requests(num_requests, max_new_tokens=4, vocab_size=24, lengths=(1, 9))
    config = replace(
        make_config(pair, tree=DynamicTreeConfig(topk=2, depth=3, num_rows=num_rows), batch_size=2),
        cache=CacheConfig(page_size=4, prefill_chunk=512),
        device=DEVICE.type,
        dtype="float32",
    )
    expected = generate(config, requests)
    outputs = generate(replace(config, attention=part("attention", "triton"), kernels=KernelsChoice.triton), requests)
    Reference(pair[0]).assert_lossless(requests, outputs, expected)
    assert sum(len(tokens) for tokens in expected.values()) >= 3 * num_requests
