"""cache.dtype=fp8: keys and values in e4m3 with a power of two for each head of each token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from spec_kernels.narrow_kv import in_two_parts
from spec_kernels.narrow_kv_reference import narrowed, widened, write_rows
from spec_kernels.rope_write import rope_write, write_kv
from spec_lab.config.choices import CacheDtype
from tests.covering import each_value
from tests.kernel_lab import DEVICE, DTYPES, assert_near, randn
from tests.lab import make_config, make_engine, make_pair, part, random_requests, with_depth_as_k
from tests.lossless_cases import TREES
from tests.test_triton_attention import SPLIT, attend, fill, reference, set_tiles_to_fill


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
@pytest.mark.parametrize(
    "shape", each_value([1, 4, 8, 40], [None, 30], [64, 96, 16, 256], [False, False, True], [10**6, 1], times=2)
)
def test_attention_over_e4m3_has_the_bits_of_the_numbers_that_it_stands_for(
    dtype: torch.dtype, shape: tuple[int, int | None, int, bool, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Powers of two change no rounding, but where weights times them leave float16's range."""
    num_queries, window, head_dim, has_sinks, num_tiles_to_fill = shape
    set_tiles_to_fill(monkeypatch, num_tiles_to_fill)
    paged = fill([40, 77, 300], num_kv_heads=2, head_dim=head_dim, dtype=dtype)
    narrow, wide = paged.narrowed(), replace(paged, kv=widened(*narrowed(paged.kv), dtype))
    queries = randn(3 * num_queries, 8, head_dim, seed=1).bfloat16().to(dtype)
    given = {"window": window, "sinks": randn(8, seed=2) if has_sinks else None}
    out = attend(narrow, queries, split=2 * SPLIT, **given)
    if dtype is torch.float32 and DEVICE.type == "cpu":  # a GPU may multiply and add at once
        assert torch.equal(out, attend(wide, queries, split=2 * SPLIT, **given))
    expected = reference(narrow, queries, **given)
    if dtype is torch.float16 and DEVICE.type == "cuda":  # its tensor cores add products of 8 bits with some 14 bits
        out, expected = out.bfloat16(), expected.bfloat16()
    assert_near(out, expected)


@pytest.mark.parametrize("num_queries", [2, 40])
def test_small_values_keep_their_bits_in_float16(num_queries: int) -> None:
    """Weights times powers of two would leave its range. An infinite query is not made finite."""
    paged = fill([300], head_dim=64, dtype=torch.float16)
    paged.kv[:, 1] *= 2.0**-13
    queries = randn(num_queries, 4, 64, seed=1).bfloat16().half()
    queries[0, 0, 0] = float("inf")
    out, expected = attend(paged.narrowed(), queries, split=2 * SPLIT), reference(paged.narrowed(), queries)
    assert_near(out[1:] * 2.0**13, expected[1:] * 2.0**13)
    assert out[0, :64].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_sees_one_key_gives_its_value_to_the_bit(dtype: torch.dtype) -> None:
    """In bfloat16 values are widened by shifts. Each number of e4m3 stands in an even channel and in an odd one."""
    numbers = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn).float().nan_to_num(0.0)
    values = torch.stack((numbers, numbers.roll(1))).view(2, 2, 128)
    paged = fill([1, 1], head_dim=128)
    paged.kv[paged.page_table[:, 0] * paged.page_size, 1] = values
    out = attend(paged.narrowed(), randn(2, 4, 128, seed=1, dtype=dtype), split=2 * SPLIT)
    assert torch.equal(out.view(2, 2, 2, 128), values.to(dtype).unsqueeze(2).expand(2, 2, 2, 128))


@triton.jit
def add_parts(out_ptr: tl.tensor, queries_ptr: tl.tensor, ROWS: tl.constexpr, CHANNELS: tl.constexpr) -> None:
    """Split queries [rows, channels] in two, and add the parts."""
    places = tl.arange(0, CHANNELS)[:, None] + tl.arange(0, ROWS)[None, :] * CHANNELS
    first, second, ratio, power = in_two_parts(tl.load(queries_ptr + places), tl.float8e4nv)
    tl.store(out_ptr + places, (first.to(tl.float32) + second.to(tl.float32) * ratio[None, :]) * power[None, :])


def test_queries_keep_nine_bits() -> None:
    """All that bfloat16 has; float16 has eleven. Errors of small numbers follow from their row's largest."""
    rows = randn(16, 128, seed=1) * torch.logspace(-30, 0, 128, base=2.0, device=DEVICE)
    largest = rows.abs().amax(1, keepdim=True)
    for narrow, error in ((rows.bfloat16().float(), 0.0), (rows.half().float(), 2.0**-9)):
        out = torch.empty_like(rows)
        add_parts[(1,)](out, narrow, 16, 128)
        is_small = narrow.abs() < largest * 2.0**-13
        assert ((out - narrow).abs() <= torch.where(is_small, largest * 2.0**-22, narrow.abs() * error)).all()


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
