"""The KV write and the fused rotation and write against their torch forms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from spec_kernels.narrow_kv_reference import write_rows
from spec_kernels.rope_write import rope_write, write_kv
from spec_lab.core.passes import RotaryRows
from spec_lab.models.norms import per_head_norm
from tests.kernel_lab import DEVICE, DTYPES, assert_near, randn

NUM_SLOTS = 40


def slots(num_rows: int) -> torch.Tensor:
    return torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(3))[:num_rows].to(DEVICE)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "num_kv_heads", "head_dim"), [(1, 1, 16), (5, 2, 64), (33, 3, 24), (2, 8, 128)])
def test_write_puts_row_i_into_slot_i_and_nowhere_else(
    dtype: torch.dtype, num_rows: int, num_kv_heads: int, head_dim: int
) -> None:
    """Keys and values are views of wider rows, as a layer has them."""
    heads = randn(num_rows, 3 * num_kv_heads, head_dim, dtype=dtype)
    keys, values = heads[:, num_kv_heads : 2 * num_kv_heads], heads[:, 2 * num_kv_heads :]
    got, expected = (poisoned(NUM_SLOTS, 2, num_kv_heads, head_dim, dtype=dtype) for _ in range(2))
    write_kv(got, keys, values, slots(num_rows))
    write_rows(expected, None, torch.stack((keys, values), dim=1), slots(num_rows))
    assert torch.equal(got.isnan(), expected.isnan()) and int(got.isfinite().all((1, 2, 3)).sum()) == num_rows
    assert torch.equal(got.nan_to_num(9.0), expected.nan_to_num(9.0))


def test_rows_that_share_the_scratch_slot_leave_one_of_them() -> None:
    keys = randn(3, 2, 16)
    kv = torch.zeros(NUM_SLOTS, 2, 2, 16, device=DEVICE)
    write_kv(kv, keys, -keys, torch.tensor([7, 4, 7], device=DEVICE))
    assert torch.equal(kv[4, 0], keys[1]) and torch.equal(kv[4, 1], -keys[1])
    assert any(torch.equal(kv[7, 0], keys[row]) for row in (0, 2))


Fused = Callable[..., torch.Tensor]


def in_steps(
    num_heads: int,
    kv: torch.Tensor | None,
    qkv: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    norms_values: bool,
) -> torch.Tensor:
    """Do what `rope_write` does with torch's parts; the rotation is in float32, and rounded once."""
    num_kv_heads = 0 if kv is None else kv.shape[2]
    heads, values = qkv[:, : num_heads + num_kv_heads], qkv[:, qkv.shape[1] - num_kv_heads :]
    if norm_weight is not None:
        heads = per_head_norm(norm_weight, eps, norm_weight.dtype != heads.dtype)(heads)
    if norms_values:
        values = F.rms_norm(values.float(), values.shape[-1:], None, eps).to(qkv.dtype)
    rotary = RotaryRows(cos.float().unsqueeze(1), signed_sin.float().unsqueeze(1))
    turned = rotary(heads.float()).to(qkv.dtype)
    if kv is not None:
        write_rows(kv, None, torch.stack((turned[:, num_heads:], values), dim=1), slot_mapping)
    return turned[:, :num_heads]


def run_fused(
    fused: Fused,
    qkv: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    norm_weight: torch.Tensor | None = None,
    rotary_dim: int | None = None,
    norms_values: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the fused kernel; return roped queries and the cache, NaN before. The rotary rows are views of one
    table, as `RotaryTable` gives them. Without KV heads there is no cache to write to.
    """
    num_rows, _, head_dim = qkv.shape
    rotary_dim = rotary_dim or head_dim
    angles = randn(num_rows, rotary_dim // 2, seed=2).repeat(1, 2)
    signs = torch.ones(rotary_dim, device=DEVICE)
    signs[: rotary_dim // 2] = -1
    table = torch.stack((angles.cos(), angles.sin() * signs), dim=1).to(qkv.dtype)
    kv = poisoned(NUM_SLOTS, 2, num_kv_heads, head_dim, dtype=qkv.dtype)
    rotary = table[:, 0], table[:, 1]
    cache, norm = kv if num_kv_heads else None, (norm_weight, 1e-5, norms_values)
    return fused(num_heads, cache, qkv, *rotary, slots(num_rows), *norm), kv


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "num_heads", "num_kv_heads", "head_dim"),
    [(1, 4, 2, 16), (5, 7, 1, 64), (33, 6, 3, 24), (4, 8, 2, 128)],
)
def test_the_fused_kernel_equals_rotation_and_write(
    dtype: torch.dtype, num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, normed: bool
) -> None:
    """Each head has a norm of its own, where it has one."""
    qkv = randn(num_rows, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    norm = randn(num_heads + num_kv_heads, head_dim, seed=7, dtype=dtype) if normed else None
    queries, kv = run_fused(rope_write, qkv, num_heads, num_kv_heads, norm)
    expected_queries, expected_kv = run_fused(in_steps, qkv, num_heads, num_kv_heads, norm)
    assert_near(queries, expected_queries)
    assert torch.equal(kv.isnan(), expected_kv.isnan())
    assert_near(kv.nan_to_num(9.0), expected_kv.nan_to_num(9.0))
    written = slots(num_rows)
    assert torch.equal(kv[written, 1], qkv[:, num_heads + num_kv_heads :]), "values are copied, not rotated"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_kv_heads", "num_value_heads", "head_dim", "rotary_dim"),
    [(2, 2, 16, 16), (1, 1, 24, 8), (1, 0, 32, 32), (2, 0, 40, 16), (0, 0, 16, 16), (0, 0, 24, 8)],
)
@pytest.mark.parametrize("norms_values", [False, True])
def test_heads_of_gemma_and_of_qwen_are_those_of_torch(
    dtype: torch.dtype, num_kv_heads: int, num_value_heads: int, head_dim: int, rotary_dim: int, norms_values: bool
) -> None:
    """Norms with float32 weights, parts of heads that stand still, values that are keys, queries alone; and behind
    those that are read more heads, as output gates are."""
    qkv = randn(5, 3 + num_kv_heads + num_value_heads + 2, head_dim, dtype=dtype)[:, :-2]
    norm = randn(3 + num_kv_heads, head_dim, seed=7)
    outcomes = [
        run_fused(fused, qkv, 3, num_kv_heads, norm, rotary_dim, norms_values) for fused in (rope_write, in_steps)
    ]
    (queries, kv), (expected_queries, expected_kv) = outcomes
    assert_near(queries, expected_queries)
    if dtype != torch.float32:
        assert (queries != expected_queries).float().mean() < 0.05, "rounded once, behind the weight"
    assert torch.equal(kv.isnan(), expected_kv.isnan())
    assert_near(kv.nan_to_num(9.0), expected_kv.nan_to_num(9.0))
    if num_kv_heads and not norms_values:
        assert torch.equal(kv[slots(5), 1], qkv[:, -num_kv_heads:]), "values are as they came from the projection"


def test_the_rotation_is_that_of_the_models() -> None:
    """It is compared with complex numbers: channels i and i + head_dim / 2 are one pair."""
    qkv = randn(3, 3, 16)
    queries, _ = run_fused(in_steps, qkv, 1, 1)
    angles = randn(3, 8, seed=2).unsqueeze(1)
    pairs = torch.complex(qkv[:, :1, :8], qkv[:, :1, 8:]) * torch.polar(torch.ones_like(angles), angles)
    assert_near(queries, torch.cat((pairs.real, pairs.imag), dim=2))
