"""The kernels around latent attention against their references."""

from __future__ import annotations

import pytest
import torch

from spec_kernels.latent_rows import turn_queries, turned_reference, write_latents, write_latents_reference
from tests.kernel_lab import DEVICE, DTYPES, assert_near, randn

RANK, ROTATED = 20, 12


def turns(num_rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines that are none, so that each shows where it is multiplied."""
    return randn(num_rows, ROTATED, seed=5, dtype=dtype), randn(num_rows, ROTATED, seed=6, dtype=dtype)


@pytest.mark.parametrize("dtype", [DTYPES[0], *DTYPES[1:]])
def test_rows_in_their_slots_equal_the_reference(dtype: torch.dtype) -> None:
    """Nothing else of the cache is written; the rows are a part of wider ones."""
    projected, weight = randn(3, RANK + ROTATED + 4, dtype=dtype)[:, : RANK + ROTATED], randn(RANK, seed=1, dtype=dtype)
    cache = torch.full((8, RANK + ROTATED), float("nan"), dtype=dtype, device=DEVICE)
    slots = torch.tensor([5, 0, 6], device=DEVICE)
    write_latents(cache, projected, weight, *turns(3, dtype), slots, 1e-3)
    assert_near(cache[slots], write_latents_reference(projected, weight, *turns(3, dtype), 1e-3))
    assert cache[[1, 2, 3, 4, 7]].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_heads", [3, 20])
def test_turned_queries_equal_the_reference(num_heads: int, dtype: torch.dtype) -> None:
    """The channels that do not turn are left alone."""
    heads = randn(4, num_heads, 9 + ROTATED, dtype=dtype)
    queries = torch.full((4, num_heads, RANK + ROTATED), float("nan"), dtype=dtype, device=DEVICE)
    cos, signed_sin = turns(4, dtype)
    turn_queries(queries, heads, cos, signed_sin)
    expected = turned_reference(heads[..., 9:], cos.unsqueeze(1), signed_sin.unsqueeze(1))
    assert_near(queries[..., RANK:], expected.to(dtype))
    assert queries[..., :RANK].isnan().all()
