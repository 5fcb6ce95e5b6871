"""The kernels around latent attention against their torch forms, in float32."""

from __future__ import annotations

import pytest
import torch

from spec_kernels.latent_rows import turn_queries, write_latents
from spec_lab.core.passes import RotaryRows
from spec_lab.models.norms import RMSNorm
from tests.kernel_lab import DEVICE, DTYPES, assert_near, randn

RANK, ROTATED = 20, 12


def turns(num_rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines that are none, so that each shows where it is multiplied."""
    return randn(num_rows, ROTATED, seed=5, dtype=dtype), randn(num_rows, ROTATED, seed=6, dtype=dtype)


def turned(channels: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate [rows, heads, ROTATED]."""
    return RotaryRows(cos.float().unsqueeze(1), signed_sin.float().unsqueeze(1))(channels.float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_in_their_slots_equal_those_of_torch(dtype: torch.dtype) -> None:
    """Nothing else of the cache is written; the rows are a part of wider ones."""
    projected, weight = randn(3, RANK + ROTATED + 4, dtype=dtype)[:, : RANK + ROTATED], randn(RANK, seed=1, dtype=dtype)
    cache = torch.full((8, RANK + ROTATED), float("nan"), dtype=dtype, device=DEVICE)
    slots = torch.tensor([5, 0, 6], device=DEVICE)
    write_latents(cache, projected, weight, *turns(3, dtype), slots, 1e-3)
    latents, key = projected.float().tensor_split((RANK,), dim=1)
    expected = RMSNorm(weight.float(), 1e-3)(latents), turned(key.unsqueeze(1), *turns(3, dtype)).squeeze(1)
    assert_near(cache[slots], torch.cat(expected, dim=1).to(dtype))
    assert cache[[1, 2, 3, 4, 7]].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_heads", [3, 20])
def test_turned_queries_equal_those_of_torch(num_heads: int, dtype: torch.dtype) -> None:
    """The channels that do not turn are left alone."""
    heads = randn(4, num_heads, 9 + ROTATED, dtype=dtype)
    queries = torch.full((4, num_heads, RANK + ROTATED), float("nan"), dtype=dtype, device=DEVICE)
    turn_queries(queries, heads, *turns(4, dtype))
    assert_near(queries[..., RANK:], turned(heads[..., 9:], *turns(4, dtype)).to(dtype))
    assert queries[..., :RANK].isnan().all()
