"""cache.dtype=fp8: keys and values in e4m3 with a power of two for each head of each token."""

from __future__ import annotations

import pytest
import torch

from spec_kernels.narrow_kv_reference import narrowed, widened


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
    values, exponents = narrowed(rows)
    assert exponents[1].unique().tolist() == [0] and exponents[2].unique().tolist() == [1]
    wide = widened(values, exponents, dtype)
    for row, read in zip(rows.flatten(0, 2), wide.flatten(0, 2), strict=True):
        assert torch.equal(rounded(row), read.double())
    assert torch.equal(widened(*narrowed(wide), dtype), wide)
