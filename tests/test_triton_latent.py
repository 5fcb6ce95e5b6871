"""The kernel of latent attention against that of torch, and its place in a backend: no bit depends on neighbours."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_kernels.latent_attention import latent_attention
from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.attention.triton_backend import TritonAttention
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.random_weights import random_eagle3
from spec_lab.config.option import get
from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.passes import Pass
from spec_lab.core.prompts import PromptSpan
from spec_lab.core.ragged import build_metadata, in_even_batches
from spec_lab.engine.tape import TapeRecorder
from spec_lab.models.latent import NarrowQuery
from spec_lab.models.linear import make_linear
from spec_lab.models.norms import RMSNorm
from spec_lab.operators.triton_mixers import SkinnyQuery
from spec_lab.operators.triton_set import triton_set
from tests.kernel_lab import DEVICE, DTYPES, assert_near, randn
from tests.lab import Reference, generate, make_config, part, random_requests
from tests.test_expert_mtp import make_nextn
from tests.test_triton_attention import Paged, fill
from tests.test_triton_products import (
    DTYPE,
    FEATURES,
    Lane,
    assert_alike,
    assert_eagle3_alike,
    make_target,
    prompt,
)
from tests.tiny_latent import SIZES

SCALE, SPLIT = 0.25, 64
RANK, ROTATED = 20, 12


def fill_latents(lens: list[int], dtype: torch.dtype = torch.float32, garbage: float = float("nan")) -> Paged:
    """A cache of rows of 32 numbers, whose pages are dealt in a shuffled order; all that is no row is `garbage`."""
    paged = fill(lens, num_kv_heads=1, head_dim=(RANK + ROTATED) // 2, dtype=dtype, garbage=garbage)
    return replace(paged, kv=paged.kv.flatten(1))


def attend(
    paged: Paged, queries: torch.Tensor, window: int | None = None, max_seq_len: int | None = None, split: int = SPLIT
) -> torch.Tensor:
    """Run the kernel."""
    tables = (paged.kv, paged.page_table, paged.seq_lens, paged.page_size)
    return latent_attention(queries, *tables, max_seq_len or paged.longest, split, SCALE, window, RANK)


def reference(paged: Paged, queries: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """Attend in torch, in float32."""
    latent, metadata = TorchAttention(paged.page_size, paged.longest).latent, paged.metadata(queries)
    assert latent is not None
    cache = LayerCache(paged.kv.float().nan_to_num(0.0))
    out = latent.attend(queries.float().contiguous(), cache, metadata, window, RANK, SCALE)
    return paged.seen(out, metadata).to(queries.dtype)


def random_queries(count: int, num_heads: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return randn(count, num_heads, RANK + ROTATED, seed=1, dtype=dtype)


@pytest.mark.parametrize(
    ("num_heads", "rows"),
    [
        (3, (2, 9)),
        (20, (1, None)),
        (1, (2, 1)),
        (5, (4, None)),
        (1, (16, 20)),
    ],
)
def test_equals_that_of_torch(num_heads: int, rows: tuple[int, int | None]) -> None:
    """Lengths are ragged, beside page and split borders, and shorter than the rows too; all that is no key is NaN."""
    num_queries, window = rows
    lens = [1, 17, 66]
    paged = fill_latents(lens)
    queries = random_queries(len(lens) * num_queries, num_heads)
    assert_near(attend(paged, queries, window), reference(paged, queries, window))


@pytest.mark.parametrize("num_heads", [16, 20, 128])
@pytest.mark.parametrize("num_queries", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_any_dtype_equals_that_of_torch(dtype: torch.dtype, num_queries: int, num_heads: int) -> None:
    """The number of heads sets the height of a tile, which may hold the heads of several rows, or some of a row's."""
    paged = fill_latents([13, 64, 150], dtype)
    queries = random_queries(3 * num_queries, num_heads, dtype)
    for window in (None, 70):
        assert_near(attend(paged, queries, window), reference(paged, queries, window))


def test_more_splits_than_are_merged_at_once_and_a_whole_one() -> None:
    paged = fill_latents([64 * 17 + 5, 64 * 3])
    queries = random_queries(4, 2)
    for window in (None, 100):
        for split in (SPLIT, 2048):
            assert_near(attend(paged, queries, window, split=split), reference(paged, queries, window))


def test_strided_queries() -> None:
    paged = fill_latents([13, 70])
    queries = random_queries(4)
    wide = torch.cat((queries, queries), dim=-1)[:, :, : RANK + ROTATED]
    assert torch.equal(attend(paged, wide), attend(paged, queries))


def test_what_is_no_row_of_the_request_changes_no_bit() -> None:
    """Past a sequence's end, before every row's window, on unused pages, and past `max_seq_len`."""
    queries = random_queries(8, 2)
    clean, poisoned = (fill_latents([9, 70], garbage=cell) for cell in (0.0, float("nan")))
    for window in (None, 6):
        assert torch.equal(attend(poisoned, queries, window, 78), attend(clean, queries, window))
    first = poisoned.page_table[1, 0] * 16
    poisoned.kv[first : first + 16] = float("nan")
    assert torch.equal(attend(poisoned, queries, 6)[4:], attend(clean, queries, 6)[4:])


def test_a_row_that_sees_nothing_gives_zeros() -> None:
    paged = fill_latents([1, 2 * SPLIT])
    for split in (SPLIT, 2 * SPLIT):
        out = attend(paged, random_queries(8), split=split)
        assert (out[:3] == 0).all() and (out[3] != 0).all() and out.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    """It does not, bit for bit: plain decoding asks for one row at a time, verify for up to 16."""
    length, num_queries = 84, 16
    paged = fill_latents([length], dtype)
    queries = random_queries(num_queries, dtype=dtype)
    together = attend(paged, queries)
    for first, last in ((0, 1), (15, 16), (3, 7)):
        paged.seq_lens.fill_(length - (num_queries - last))
        assert torch.equal(attend(paged, queries[first:last]), together[first:last]), (first, last)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_request_does_not_depend_on_the_batch_or_the_bound(dtype: torch.dtype) -> None:
    """Neither the other requests nor `max_seq_len`, which sets how many splits are launched, changes a bit."""
    paged = fill_latents([9, 150, 70], dtype)
    queries = random_queries(6, dtype=dtype)
    together = attend(paged, queries)
    for request in range(3):
        alone = paged.select([request])
        rows = slice(2 * request, 2 * request + 2)
        for bound in (alone.longest, 158):
            assert torch.equal(attend(alone, queries[rows], max_seq_len=bound), together[rows]), (request, bound)


def test_the_backend_equals_that_of_torch() -> None:
    paged = fill_latents([13, 70], garbage=0.0)
    backends = [kind(paged.page_size, 96) for kind in (TritonAttention, TorchAttention)]
    queries = random_queries(8)
    outs = []
    for backend in backends:
        positions = paged.seq_lens.unsqueeze(1) - 4 + torch.arange(4, device=DEVICE)
        metadata = backend.build(positions, paged.seq_lens, paged.page_table, 70)
        cache = LayerCache(paged.kv.clone())
        assert backend.latent is not None
        backend.latent.write(cache, metadata, randn(8, RANK + ROTATED, seed=4))
        outs.append(backend.latent.attend(queries, cache, metadata, 9, RANK, SCALE))
    assert_near(*outs)


def test_whole_prompts_attend_without_a_mask_as_with_one() -> None:
    """Two whole prompts that are alike, a chunk behind others, and padding, which is not compared."""
    spans = [
        PromptSpan(0, 0, 9, True),
        PromptSpan(1, 0, 9, True),
        PromptSpan(2, 3, 12, True),
        PromptSpan(3, -5, 0, False),
    ]
    paged = fill_latents([9, 9, 12, 1], garbage=0.0)
    metadata = build_metadata(TorchAttention(paged.page_size, 96), spans, paged.page_table)
    queries, cache = randn(32, 3, 16 + ROTATED, seed=1), LayerCache(paged.kv)
    maps = randn(3, 16, RANK, seed=2), randn(3, RANK, 8, seed=3)
    latent = TritonAttention(paged.page_size, 96).latent
    assert latent is not None
    attend = latent.attend_unfolded
    outs = []
    for is_known in (True, False):
        for batch in metadata.batches:
            batch.known_len = batch.known_len if is_known else None
        outs.append(
            in_even_batches(lambda b: attend(queries[b.rows], cache, b.metadata, None, *maps, SCALE), metadata)[:27]
        )
        assert bool(metadata.batches[0].masks) != is_known
    assert_near(*outs)


@pytest.mark.parametrize(
    "changes", [{}, {"q_lora_rank": None, "attention_bias": True, "num_hidden_layers": 1}, {"kv_lora_rank": 48}]
)
@torch.inference_mode()
def test_a_target_of_16_bits_gives_what_it_gives_without_fused_products(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Short prompts, then prompt rows that are more than few, then a round of two requests; a row of it is bit-equal
    alone."""
    architecture = {"model_type": "deepseek_v3", "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(SIZES | architecture | changes))
    config = read_model_config(tmp_path)
    outputs, lanes, targets = [], [], []
    for kernels in (triton_set().without_parts(), triton_set()):
        lane = Lane.of(config.layers)
        target = make_target(config, lane, kernels)
        lane.cache.kv.zero_()
        short = target.forward(prompt(2, 6).flatten(), Pass(lane.cache, lane.metadata([0, 0], 6)), FEATURES)
        target.forward(prompt(2, 34).flatten(), Pass(lane.cache, lane.metadata([0, 0], 34)), FEATURES)
        round_ = target.forward(prompt(2, 4).flatten(), Pass(lane.cache, lane.metadata([30, 9], 4)), FEATURES)
        outputs.append((target.logits(round_.hidden), target.logits(short.hidden)))
        lanes.append(lane)
        targets.append(target)
    for got, expected in zip(*reversed(outputs), strict=True):
        assert_alike(got, expected)
    assert_alike(lanes[1].cache.kv, lanes[0].cache.kv)
    alone = targets[1].forward(prompt(2, 4)[0, :1], Pass(lanes[1].cache, lanes[1].metadata([30], 1)), FEATURES)
    # On a GPU the products of heads are the library's, which may differ. With the larger rank keys of four rows are
    # unfolded, and those of one row are not.
    if DEVICE.type == "cpu" and "kv_lora_rank" not in changes:
        assert torch.equal(targets[1].logits(alone.hidden)[0], outputs[1][0][0])
        rounds = prompt(2, 4).flatten(), Pass(lanes[1].cache, lanes[1].metadata([30, 9], 4)), FEATURES
        graph = TapeRecorder(num_warmups=0).capture(lambda: targets[1].logits(targets[1].forward(*rounds).hidden))
        graph.replay()
        assert torch.equal(graph.outputs, outputs[1][0]), "on a tape too"


def test_a_query_with_its_norm_inside_gives_what_it_gives_without() -> None:
    """Of few rows and of many; random weights of models are too small for a norm of queries to show."""
    weights = (randn(24, 32, dtype=DTYPE), randn(24, seed=1, dtype=DTYPE), randn(40, 24, seed=2, dtype=DTYPE))
    query = NarrowQuery(make_linear(weights[0]), RMSNorm(weights[1], 1e-6), make_linear(weights[2]))
    for count in (5, 70):
        rows = randn(count, 32, seed=3, dtype=DTYPE)
        assert_alike(SkinnyQuery(query)(rows), query(rows))


@pytest.mark.parametrize("selection", ["all", "before"])
@torch.inference_mode()
def test_an_eagle3_head_of_16_bits_gives_what_it_gives_without_fused_products(tmp_path: Path, selection: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": "deepseek_v3", "num_hidden_layers": 8}))
    target = read_model_config(tmp_path)
    assert random_eagle3(target, 16, DTYPE, DEVICE, 1)[0].layer.only_layer.latent is not None
    assert_eagle3_alike(target, selection)


@pytest.mark.parametrize(
    "graph", ["eager"] if DEVICE.type == "cpu" else ["eager", "round", "split_seed", "step_replay", "full_loop"]
)
def test_an_engine_gives_the_tokens_of_transformers(graph: str, tmp_path: Path) -> None:
    """Latent attention and experts in target and drafter, through all kernels."""
    make_nextn(tmp_path, "deepseek_v3", num_modules=3)
    requests = random_requests(2, max_new_tokens=3, lengths=(1, 12))
    places = {"batch_size": 2, "device": DEVICE.type, "dtype": "float32"}
    run = make_config((tmp_path, tmp_path), "mtp_eagle", prune="catchup", kernels="triton", **places)
    mode = get("graph", graph)()
    outputs = generate(replace(run, attention=part("attention", "triton"), graph=mode), requests)
    reference = Reference(tmp_path)
    plain = {request.request_id: reference.greedy(request) for request in requests}
    reference.assert_lossless(requests, outputs, plain)
