"""cache.dtype=fp8: keys and values in e4m3 with a power of two for each head of each token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spec_kernels.narrow_kv_reference import narrowed, widened, write_rows
from spec_kernels.rope_write import rope_write, write_kv
from spec_lab.config.choices import CacheDtype
from tests.kernel_lab import DEVICE, DTYPES, assert_near, randn
from tests.lab import make_config, make_engine, make_pair, part, random_requests, with_depth_as_k
from tests.lossless_cases import TREES
from tests.test_triton_attention import attend, fill, reference


def rounded(row: torch.Tensor) -> torch.Tensor:
    """Round each number to its four significant bits, and numbers far below the row's largest to fewer."""
    largest = float(row.abs().max())
    power = 2.0**-100
    while largest / power > 448:
        power *= 2
    return (row.double() / power).to(torch.float32).to(torch.float8_e4m3fn).double() * power


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_is_rounded_to_e4m3_by_its_own_power_of_two(dtype: torch.dtype) -> None:
    rows = (torch.randn(64, 2, 3, 16, generator=torch.Generator().manual_seed(1))).to(dtype)
    rows *= torch.logspace(-4, 3, 64, dtype=dtype).view(-1, 1, 1, 1)
    rows[0] = 0
    rows[1, :, :, 0] = 448
    rows[2, :, :, 0] = 464
    values, powers = narrowed(rows)
    assert powers[1].unique().tolist() == [1] and powers[2].unique().tolist() == [2]
    wide = widened(values, powers, dtype)
    for row, read in zip(rows.flatten(0, 2), wide.flatten(0, 2), strict=True):
        assert torch.equal(rounded(row), read.double())
    assert torch.equal(widened(*narrowed(wide), dtype), wide)


def cache(num_slots: int, num_kv_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    kv = torch.zeros(num_slots, 2, num_kv_heads, head_dim, dtype=torch.uint8, device=DEVICE)
    return kv.view(torch.float8_e4m3fn), torch.zeros(num_slots, num_kv_heads, 2, dtype=torch.bfloat16, device=DEVICE)


def assert_same_bits(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(got[1], expected[1]) and torch.equal(got[0].view(torch.uint8), expected[0].view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "num_kv_heads", "head_dim"), [(1, 1, 16), (33, 3, 24), (9, 2, 128)])
def test_the_kernel_writes_the_bits_of_the_reference(
    dtype: torch.dtype, num_rows: int, num_kv_heads: int, head_dim: int
) -> None:
    keys, values = (randn(num_rows, num_kv_heads, head_dim, seed=seed) for seed in (1, 2))
    keys *= torch.logspace(-3, 3, num_rows, device=DEVICE).view(-1, 1, 1)
    keys[0] = 0
    keys[:, :, 1:4] = keys[:, :, :1] * torch.tensor([2**-9, 1.49 * 2**-10, 31 / 32], device=DEVICE)
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(3))[:num_rows].to(DEVICE)
    got, expected = (cache(40, num_kv_heads, head_dim) for _ in range(2))
    rows = keys.to(dtype), values.to(dtype), slots
    write_kv(got[0], *rows, got[1])
    write_rows(*expected, torch.stack(rows[:2], dim=1), slots)
    assert_same_bits(got, expected)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(32, 32), (40, 24)])
@pytest.mark.parametrize("is_normed", [False, True])
def test_rotated_keys_are_those_of_the_kernel_that_writes_them_wide(
    head_dim: int, rotary_dim: int, is_normed: bool
) -> None:
    num_rows, num_heads, num_kv_heads = 5, 4, 2
    qkv = randn(num_rows, num_heads + 2 * num_kv_heads, head_dim)
    cos, sin = (randn(num_rows, rotary_dim, seed=seed) for seed in (4, 5))
    slots = torch.tensor([3, 1, 8, 0, 5], device=DEVICE)
    weight = randn(num_heads + num_kv_heads, head_dim, seed=6) if is_normed else None
    narrow, expected = (cache(9, num_kv_heads, head_dim) for _ in range(2))
    wide = torch.zeros(9, 2, num_kv_heads, head_dim, device=DEVICE)
    given = qkv, cos, sin, slots, weight, 1e-6
    queries = rope_write(num_heads, narrow[0], *given, False, narrow[1]), rope_write(num_heads, wide, *given)
    write_rows(*expected, wide[slots], slots)
    assert torch.equal(*queries)
    assert_same_bits(narrow, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_queries", [1, 4, 40])
@pytest.mark.parametrize("window", [None, 30])
def test_attention_over_e4m3_has_the_bits_of_the_numbers_that_it_stands_for(
    dtype: torch.dtype, num_queries: int, window: int | None
) -> None:
    """Powers of two change no rounding, but where weights times them leave float16's range."""
    paged = fill([40, 77, 130], num_kv_heads=2, head_dim=64, dtype=dtype, garbage=0.0)
    kv, powers = narrowed(paged.kv)
    narrow = replace(paged, kv=kv, powers=powers)
    wide = replace(paged, kv=widened(kv, powers, dtype))
    queries = randn(3 * num_queries, 8, 64, dtype=torch.bfloat16, seed=1).to(dtype)  # eight bits, as two parts hold
    if dtype is torch.float32 and DEVICE.type == "cpu":  # a GPU may multiply and add at once
        assert torch.equal(attend(narrow, queries, window), attend(wide, queries, window))
    assert_near(attend(narrow, queries, window), reference(narrow, queries, window))


@pytest.mark.parametrize("tree", ["none", pytest.param("static", marks=pytest.mark.slow)])
def test_drafts_change_no_token_over_a_cache_in_e4m3(tree: str, tmp_path: Path) -> None:
    """Attention of the kernels has a row's bits in every round, so its keys are rounded alike with and without drafts.
    A tree moves rows with their powers."""
    pair = make_pair(tmp_path)
    requests = random_requests(2, max_new_tokens=8, lengths=(2, 20))
    narrow = {"dtype": CacheDtype.fp8, "drafter_dtype": CacheDtype.fp8, "prefill_chunk": 8}
    triton = part("attention", "triton")
    plain, drafting = (
        replace(
            make_config(pair, drafter, cache=dict(narrow), batch_size=2, device=DEVICE.type, dtype="float32"),
            attention=triton,
        )
        for drafter in ("none", "eagle3")
    )
    if tree != "none":
        drafting = with_depth_as_k(replace(drafting, tree=TREES[tree]))
    engines = [make_engine(config, requests) for config in (plain, drafting)]
    tokens = [[record.output_ids for record in engine.generate(requests).requests] for engine in engines]
    assert tokens[0] == tokens[1]
    assert all(engine.parts.cache.is_narrow for engine in engines)
    wide = make_engine(replace(plain, cache=replace(plain.cache, dtype=CacheDtype.auto)), requests)
    widths = [sum(tensor.nbytes for tensor in engine.parts.cache.tensors) for engine in (engines[0], wide)]
    assert widths[0] < 0.35 * widths[1], "a byte and a share of a power for four bytes"
