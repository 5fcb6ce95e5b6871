"""Weights of 4 bits: how they are rounded, kept, widened and multiplied, in torch and in Triton."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from spec_kernels.four_bits_reference import (
    E2M1,
    four_bits_widened,
    packed_codes,
    packed_scales,
    unpacked_codes,
    widen_reference,
)
from spec_kernels.product import product, product_reference
from spec_kernels.project_heads import project_heads
from spec_kernels.widen import widen
from spec_lab.checkpoints.keep_narrow import INT4, MXFP4, NarrowForm
from spec_lab.models.linear import NarrowLinear, make_linear
from tests.kernel_lab import DEVICE, DTYPES, assert_near, randn
from tests.test_kernels_project_heads import in_two_launches

FORMS = {"int4": INT4, "mxfp4": MXFP4}


def in_groups(form: NarrowForm, weight: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales with groups of `size`, each with a zero point of its own in int4."""
    codes, scales = form.narrowed(weight)
    if scales.ndim == 2:
        return codes, scales
    groups = F.pad(weight, (0, -weight.shape[1] % size)).unflatten(1, (-1, size))
    low, high = groups.amin(2), groups.amax(2)
    factors = ((high - low) / 15).to(weight.dtype)
    zeros = (-low / factors).round().clamp(0, 15)
    codes = (groups / factors.unsqueeze(2) + zeros.unsqueeze(2)).round().clamp(0, 15)
    return codes.flatten(1)[:, : weight.shape[1]].to(torch.uint8), torch.stack((factors, zeros), dim=2)


@pytest.mark.parametrize("in_features", [128, 40, 300])
def test_codes_are_unpacked_as_they_were_packed(in_features: int) -> None:
    codes = torch.randint(16, (5, in_features), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = packed_codes(codes)
    assert packed.shape == (5, -(-in_features // 128) * 32) and packed.dtype is torch.int16
    assert torch.equal(unpacked_codes(packed, in_features), codes)


def test_mxfp4_is_the_nearest_float_and_the_even_one_between_two() -> None:
    """By hand, in a group whose largest number is 7: its power is 1, and what is above 6 becomes 6."""
    numbers = torch.tensor([7.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.1, 0.26, -0.74, 6.9, 0.0, -0.24])
    weight = F.pad(numbers, (0, 32 - len(numbers))).unsqueeze(0)
    codes, scales = MXFP4.narrowed(weight)
    nearest = [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -6.0, 0.5, -0.5, 6.0, 0.0, -0.0]
    assert scales.tolist() == [[127]]
    assert MXFP4.widened(codes, scales, torch.float32)[0, : len(numbers)].tolist() == nearest
    assert [E2M1[code] for code in codes[0].tolist()[: len(numbers)]] == nearest


@pytest.mark.parametrize("form", FORMS)
def test_a_number_is_off_by_half_a_step_of_its_group(form: str) -> None:
    weight = randn(40, 300).cpu() * torch.logspace(-3, 1, 40).view(-1, 1)
    codes, scales = FORMS[form].narrowed(weight)
    wide = FORMS[form].widened(codes, scales, torch.float32)
    size = 128 if form == "int4" else 32
    largest = F.pad(weight, (0, -300 % size)).unflatten(1, (-1, size)).abs().amax(2)
    most = largest.repeat_interleave(size, dim=1)[:, :300] * (1.01 / 15 if form == "int4" else 1 / 4)
    assert ((wide - weight).abs() <= most).all()
    again = FORMS[form].widened(*FORMS[form].narrowed(wide), torch.float32)
    assert form == "int4" or torch.equal(again, wide)
    assert not FORMS[form].widened(*FORMS[form].narrowed(torch.zeros(3, 40)), torch.float32).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form", "size"), [("int4", 128), ("int4", 32), ("int4", 64), ("mxfp4", 32)])
@pytest.mark.parametrize("in_features", [256, 300])
def test_the_kernel_widens_to_the_bits_of_the_reference(
    dtype: torch.dtype, form: str, size: int, in_features: int
) -> None:
    weight = randn(70, in_features, dtype=dtype) / 8
    codes, scales = in_groups(FORMS[form], weight, size)
    got, expected = (torch.empty(70, in_features, dtype=dtype, device=DEVICE) for _ in range(2))
    widen(got, packed_codes(codes), packed_scales(scales))
    widen_reference(expected, packed_codes(codes), packed_scales(scales))
    assert torch.equal(got, expected)
    assert torch.equal(expected, four_bits_widened(codes, scales, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form", "size"), [("int4", 128), ("int4", 32), ("mxfp4", 32)])
@pytest.mark.parametrize(("num_rows", "in_features", "gated"), [(1, 256, True), (16, 512, False), (40, 300, True)])
def test_a_product_is_that_of_the_wide_numbers(
    dtype: torch.dtype, form: str, size: int, num_rows: int, in_features: int, gated: bool
) -> None:
    height, out_features = (160, 80) if gated else (80, 80)
    codes, scales = in_groups(FORMS[form], randn(height, in_features, dtype=dtype) / 16, size)
    rows = randn(num_rows, in_features, dtype=dtype, seed=1)
    residual = randn(num_rows, out_features, dtype=dtype, seed=2)
    norm = None if num_rows > 16 else randn(in_features, seed=3)
    arrivals = torch.zeros(32, dtype=torch.int32, device=DEVICE)
    given = rows, packed_codes(codes), arrivals, None, norm, 1e-5, residual, gated
    scales = packed_scales(scales)
    assert_near(product(*given, scales=scales), product_reference(*given, scales=scales))


def test_heads_are_projected_with_a_weight_of_4_bits() -> None:
    weight = randn((4 + 2 * 2) * 32, 256) / 16
    codes, scales = in_groups(INT4, weight, 128)
    rows, turns, slots = randn(3, 256, seed=1), randn(3, 32, seed=2), torch.tensor([1, 4, 0], device=DEVICE)
    arrivals = torch.zeros(32, dtype=torch.int32, device=DEVICE)
    results = []
    for project in (project_heads, in_two_launches):
        kv = torch.zeros(5, 2, 2, 32, device=DEVICE)
        half = turns[:, :16]
        cos, sin = torch.cat((half, half), 1), torch.cat((-half, half), 1)
        queries = project(kv, rows, packed_codes(codes), arrivals, None, None, 0.0, cos, sin, slots, scales)
        results.append((queries, kv))
    for got, expected in zip(*results, strict=True):
        assert_near(got, expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_fused_product_of_torch_keeps_4_bits(form: str) -> None:
    pieces = [FORMS[form].narrowed(randn(rows, 300, seed=rows).cpu()) for rows in (64, 40)]
    linear = make_linear(torch.cat([codes for codes, _ in pieces]), None, torch.cat([scales for _, scales in pieces]))
    assert isinstance(linear, NarrowLinear) and linear.weight.numel() * 2 == 104 * 384 / 2
    rows = randn(5, 300, seed=1).cpu()
    wide = torch.cat([FORMS[form].widened(*piece, torch.float32) for piece in pieces])
    assert torch.equal(linear(rows), F.linear(rows, wide))
