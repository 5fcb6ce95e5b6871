"""The dot that Triton's interpreter has in tests: no BLAS decides how it rounds, so bits compare on any machine."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.kernel_lab import DEVICE, INTERPRETED, randn

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a GPU has a dot of its own")


@triton.jit
def _dot_kernel(left_ptr, right_ptr, sums_ptr, ROWS: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr):
    rows, inputs, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, DEPTH), tl.arange(0, COLUMNS)
    left = tl.load(left_ptr + rows * DEPTH + inputs)
    right = tl.trans(tl.load(right_ptr + columns[:, None] * DEPTH + inputs))
    sums_ptrs = sums_ptr + rows * COLUMNS + columns
    tl.store(sums_ptrs, tl.dot(left, right, tl.load(sums_ptrs), input_precision="ieee"))


def add_dot(sums: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return sums [rows, columns] and the product of left [rows, depth] and right [columns, depth]."""
    sums = sums.clone()
    _dot_kernel[(1,)](left, right, sums, *left.shape, right.shape[0])
    return sums


def test_inputs_are_summed_one_after_another() -> None:
    """So a kernel that orders them by its number of rows is found out. Products of 11 bits each are exact."""
    left, right = (randn(16, 64, seed=seed).half() for seed in (1, 2))
    sums, expected = randn(16, 16, seed=3), torch.zeros(16, 16, device=DEVICE)
    for column in range(64):
        expected += left[:, column, None].float() * right[:, column].float()
    for dtype in (torch.float16, torch.float32):
        assert torch.equal(add_dot(sums, left.to(dtype), right.to(dtype)), expected + sums)
    assert not torch.equal(expected, (left.double() @ right.double().T).float()), "each sum is rounded"
