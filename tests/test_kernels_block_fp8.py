"""Products of a few rows with weights in e4m3 against their reference, and what widens such weights."""

from __future__ import annotations

import pytest
import torch

from spec_kernels.block_fp8_reference import dequantise_reference, packed, unpacked
from spec_kernels.product import product, product_reference
from spec_kernels.product_tiles import INVARIANT_ROWS
from spec_kernels.widen import widen
from tests.kernel_lab import DEVICE, DTYPES, assert_near, randn
from tests.test_kernels_product import run, tiles

__all__ = ["tiles"]

NAN = 0x7F


def every_number() -> torch.Tensor:
    """Return all finite numbers of e4m3 in a row of 256, the first two twice."""
    codes = torch.tensor([code for code in range(256) if code & NAN != NAN] + [0, 1], dtype=torch.uint8)
    return codes.view(torch.float8_e4m3fn).view(1, 256)


def narrow(
    out_features: int, in_features: int, of_blocks: bool = True, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a packed weight, and scales that differ from block to block, or from row to row."""
    values = (80 * randn(out_features, in_features, seed=seed)).to(torch.float8_e4m3fn)
    rows = -(-out_features // 128) if of_blocks else out_features
    scales = (1 + randn(rows, -(-in_features // 128), seed=seed + 1).abs()) * in_features**-0.5 / 100
    return packed(values), scales


@pytest.mark.parametrize("in_features", [128, 300, 40])
def test_packing_is_taken_back(in_features: int) -> None:
    values = randn(5, in_features).to(torch.float8_e4m3fn)
    pairs = packed(values)
    assert pairs.dtype is torch.int16 and pairs.shape == (5, -(-in_features // 128) * 64)
    assert torch.equal(unpacked(pairs, in_features).float(), values.float())


def test_a_pair_is_two_halves_of_a_block() -> None:
    """Input i has the bits of bfloat16, 2**120 times too small, and input 64 + i those that are left."""
    values = every_number().to(DEVICE)
    first = packed(values)[0] & torch.tensor(0x87F0 - 2**16, dtype=torch.int16, device=DEVICE)
    expected = torch.cat((values[0, :64], values[0, 128:192])).float() * 2.0**-120
    assert torch.equal(first.view(torch.bfloat16).float(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_is_widened_without_rounding(dtype: torch.dtype) -> None:
    """Denormals of e4m3 are the smallest ones, and 448 the largest."""
    wide = torch.full((1, 256), float("nan"), dtype=dtype, device=DEVICE)
    widen(wide, packed(every_number().to(DEVICE)), torch.ones(1, 2, device=DEVICE))
    assert torch.equal(wide.float().cpu(), every_number().float())


@pytest.mark.parametrize("of_blocks", [True, False])
@pytest.mark.parametrize(("out_features", "in_features"), [(200, 192), (40, 40), (128, 256)])
def test_dequantising_equals_its_reference(out_features: int, in_features: int, of_blocks: bool) -> None:
    weight, scales = narrow(out_features, in_features, of_blocks)
    got, expected = (torch.full((out_features, in_features), float("nan"), device=DEVICE) for _ in range(2))
    widen(got, weight, scales)
    dequantise_reference(expected, weight, scales)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of_blocks", [True, False])
@pytest.mark.parametrize(("num_rows", "out_features", "in_features"), [(1, 200, 192), (5, 40, 300), (33, 72, 40)])
def test_a_product_equals_its_reference(
    dtype: torch.dtype, of_blocks: bool, num_rows: int, out_features: int, in_features: int
) -> None:
    """Sizes that blocks do not divide, and rows that are a view of wider ones."""
    rows = randn(num_rows, in_features + 8, dtype=dtype)[:, :in_features]
    weight, scales = narrow(out_features, in_features, of_blocks)
    assert_near(run(product, rows, weight, scales=scales), run(product_reference, rows, weight, scales=scales))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("fused", ["norm", "gated", "bias", "residual"])
def test_what_fuses_equals_its_reference(tiles: object, fused: str, splits: int, turned: bool) -> None:
    """Two tiles of a block and two blocks of outputs, so that each has scales of its own."""
    tiles(64, 128, splits, turned=turned)  # type: ignore[operator]
    rows, gated = 3 * randn(3, 256), fused == "gated"
    weight, scales = narrow(384 if gated else 192, 256)
    parts = {
        "norm": {"norm_weight": randn(256, seed=2)},
        "gated": {"gated": True, "norm_weight": randn(256, seed=2)},
        "bias": {"bias": randn(192, seed=2), "norm_weight": randn(256, seed=2)},
        "residual": {"residual": randn(3, 200, seed=2)[:, :192]},
    }[fused]
    got = run(product, rows, weight, scales=scales, **parts)  # type: ignore[arg-type]
    assert_near(got, run(product_reference, rows, weight, scales=scales, **parts))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_rows_beside_it(tiles: object, dtype: torch.dtype) -> None:
    tiles(64, 128, 2)  # type: ignore[operator]
    rows, (weight, scales) = randn(INVARIANT_ROWS, 512, dtype=dtype), narrow(64, 512)
    norm_weight = randn(512, seed=4)
    whole = run(product, rows, weight, scales=scales, norm_weight=norm_weight)
    for num_rows in (1, 2, 5, 15):
        alone = run(product, rows[:num_rows], weight, scales=scales, norm_weight=norm_weight)
        assert torch.equal(alone, whole[:num_rows])
