"""The products of each head's rows with its matrix against torch, and that a row looks at itself alone."""

from __future__ import annotations

import pytest
import torch

from spec_kernels.early import early_launches
from spec_kernels.head_products import MAX_HEAD_ROWS, absorb_and_write, multiply_heads
from spec_kernels.latent_rows import write_latents
from spec_lab.core.passes import RotaryRows
from spec_lab.models.latent import each_head
from tests.kernel_lab import DEVICE, DTYPES, assert_near, randn

NUM_HEADS, IN, OUT, ROTATED = 3, 36, 72, 8


def turns(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return randn(num_rows, ROTATED, seed=3), randn(num_rows, ROTATED, seed=4)


def in_torch(
    heads: torch.Tensor, maps: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None
) -> torch.Tensor:
    out = each_head(heads[..., :IN].float(), maps.float())
    if cos is not None and sin is not None:
        turned = RotaryRows(cos.unsqueeze(1), sin.unsqueeze(1))(heads[..., IN:].float())
        out = torch.cat((out, turned), dim=-1)
    return out.to(heads.dtype)


@pytest.mark.parametrize("does_turn", [True, False])
def test_equals_its_torch_form(does_turn: bool) -> None:
    """Of heads whose rows lie apart, as those of a longer product do."""
    cos, sin = turns(5) if does_turn else (None, None)
    heads = randn(5, NUM_HEADS, IN + (ROTATED if does_turn else 0) + 4)[..., 4:]
    maps = randn(NUM_HEADS, IN, OUT, seed=1).div(IN**0.5)
    assert_near(multiply_heads(heads, maps, cos, sin), in_torch(heads, maps, cos, sin))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    cos, sin = turns(MAX_HEAD_ROWS)
    heads = randn(MAX_HEAD_ROWS, NUM_HEADS, IN + ROTATED, dtype=dtype)
    maps = randn(NUM_HEADS, IN, OUT, seed=1).div(IN**0.5).to(dtype)
    together = multiply_heads(heads, maps, cos, sin)
    assert_near(together, in_torch(heads, maps, cos, sin))
    for first, last in ((0, 1), (15, 16), (3, 7)):
        part = slice(first, last)
        assert torch.equal(multiply_heads(heads[part], maps, cos[part], sin[part]), together[part])


@pytest.mark.parametrize("in_width", [36, 160, 256])
def test_maps_that_are_loaded_ahead_change_no_bit(in_width: int) -> None:
    """In one step, in three of which the last is not whole, and in two whole ones; in the launch of this product alone,
    and in that which writes the cache too."""
    cos, sin = turns(5)
    heads = randn(5, NUM_HEADS, in_width + ROTATED)
    maps = randn(NUM_HEADS, in_width, OUT, seed=1).div(in_width**0.5)
    rows = (randn(5, OUT + ROTATED), 1 + randn(OUT, seed=6), torch.arange(5, device=DEVICE), 1e-5)
    expected = multiply_heads(heads, maps, cos, sin)
    with early_launches():
        alone = multiply_heads(heads, maps, cos, sin)
        both = absorb_and_write(heads, maps, cos, sin, torch.zeros(5, OUT + ROTATED, device=DEVICE), *rows)
    assert torch.equal(alone, expected) and torch.equal(both, expected)


@pytest.mark.parametrize("num_rows", [1, 7])
def test_both_launches_before_attention_in_one_are_the_same_bits(num_rows: int) -> None:
    """With more rows than programs that write them, of a product that has further columns beside them."""
    cos, sin = turns(num_rows)
    heads = randn(num_rows, NUM_HEADS, IN + ROTATED)
    maps = randn(NUM_HEADS, IN, OUT, seed=1).div(IN**0.5)
    projected = randn(num_rows, 5 + OUT + ROTATED, seed=5)[:, 5:]
    norm, slots = 1 + randn(OUT, seed=6), torch.randperm(20, device=DEVICE)[:num_rows]
    caches = [torch.full((20, OUT + ROTATED), 7.0, device=DEVICE) for _ in range(2)]
    write_latents(caches[0], projected, norm, cos, sin, slots, 1e-5)
    queries = absorb_and_write(heads, maps, cos, sin, caches[1], projected, norm, slots, 1e-5)
    assert torch.equal(queries, multiply_heads(heads, maps, cos, sin)) and torch.equal(caches[1], caches[0])
