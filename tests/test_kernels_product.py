"""Products of a few rows against their reference, with everything that fuses with them."""

from __future__ import annotations

import pytest
import torch

from spec_kernels.early import early_launches
from spec_kernels.product import product, product_reference
from spec_kernels.product_tiles import INVARIANT_ROWS, SkinnyTiles, tiles_of_product
from tests.kernel_lab import DEVICE, DTYPES, assert_near, randn

EPS = 1e-5


def run(
    function: object,
    rows: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    activation: str = "silu",
    multiplied: torch.Tensor | None = None,
    arrivals: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the kernel or its reference."""
    if arrivals is None:
        arrivals = torch.zeros(len(weight), dtype=torch.int32, device=DEVICE)
    parts = bias, norm_weight, EPS, residual, gated, activation, multiplied
    out = function(rows, weight, arrivals, *parts, scales=scales)  # type: ignore[operator]
    assert not arrivals.any(), "the last split leaves zeros"
    return out


def weights(out_features: int, in_features: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return (randn(out_features, in_features, seed=seed) * in_features**-0.5).to(dtype)


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> object:
    """Choose the tiles by hand, so that small sizes have several of them."""

    def use(*chosen: int, turned: bool = False) -> None:
        columns, depth, splits = chosen
        monkeypatch.setattr(
            "spec_kernels.product.tiles_of_product",
            lambda *_: SkinnyTiles(columns, depth, splits, stages=2, turned=turned),
        )

    return use


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "out_features", "in_features"), [(1, 48, 64), (5, 40, 48), (16, 64, 32), (33, 24, 40)]
)
def test_a_product_equals_its_reference(dtype: torch.dtype, num_rows: int, out_features: int, in_features: int) -> None:
    """Sizes that tiles do not divide, and rows that are a view of wider ones."""
    rows = randn(num_rows, in_features + 8, dtype=dtype)[:, :in_features]
    weight = weights(out_features, in_features, dtype)
    assert_near(run(product, rows, weight), run(product_reference, rows, weight))


@pytest.mark.parametrize(("splits", "has_norm"), [(1, True), (4, False)])
def test_weights_that_are_loaded_ahead_change_no_bit(tiles: object, splits: int, has_norm: bool) -> None:
    """Rows as they come and rows that are normed, in four steps and in one."""
    tiles(16, 16, splits)  # type: ignore[operator]
    rows, weight = 3 * randn(3, 64), weights(40, 64, torch.float32)
    norm_weight = randn(64, seed=2) if has_norm else None
    expected = run(product, rows, weight, norm_weight=norm_weight)
    with early_launches():
        assert torch.equal(run(product, rows, weight, norm_weight=norm_weight), expected)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("fused", ["norm", "gated", "gelu", "bias", "residual", "multiplied"])
def test_what_fuses_equals_its_reference(tiles: object, fused: str, splits: int, turned: bool) -> None:
    tiles(16, 16, splits, turned=turned)  # type: ignore[operator]
    rows, gated = 3 * randn(3, 64), fused in ("gated", "gelu")
    weight = weights(64 if gated else 32, 64, torch.float32)
    parts = {
        "norm": {"norm_weight": randn(64, seed=2)},
        "gated": {"gated": True, "norm_weight": randn(64, seed=2)},
        "gelu": {"gated": True, "activation": "gelu_tanh"},
        "multiplied": {"multiplied": randn(3, 40, seed=2)[:, :32], "activation": "gelu_tanh"},
        "bias": {"bias": randn(32, seed=2), "norm_weight": randn(64, seed=2)},
        "residual": {"residual": randn(3, 40, seed=2)[:, :32]},
    }[fused]
    assert_near(run(product, rows, weight, **parts), run(product_reference, rows, weight, **parts))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features", "splits"), [(48, 256, 2), (32, 128, 1)])
def test_a_row_does_not_depend_on_the_rows_beside_it(
    tiles: object, dtype: torch.dtype, out_features: int, in_features: int, splits: int
) -> None:
    tiles(16, 64, splits)  # type: ignore[operator]
    rows, weight = randn(INVARIANT_ROWS, in_features, dtype=dtype), weights(out_features, in_features, dtype)
    norm_weight = randn(in_features, seed=4)
    whole = run(product, rows, weight, norm_weight=norm_weight)
    for num_rows in (1, 2, 5, 15):
        assert torch.equal(run(product, rows[:num_rows], weight, norm_weight=norm_weight), whole[:num_rows])


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.itemsize == 2])
@pytest.mark.parametrize("in_features", [8, 64, 65, 200, 576, 1536])
@pytest.mark.parametrize("fused", ["norm", "gated", "bias", "residual"])
def test_a_small_weight_is_multiplied_at_once(dtype: torch.dtype, in_features: int, fused: str) -> None:
    """Inputs of one part and of two, whole or not; a row has the same bits beside others and placed early."""
    rows, gated = 3 * randn(INVARIANT_ROWS, in_features, dtype=dtype), fused == "gated"
    weight = weights(80 if gated else 40, in_features, dtype)
    norm_weight = randn(in_features, seed=2)
    parts = {
        "norm": {"norm_weight": norm_weight},
        "gated": {"gated": True, "norm_weight": norm_weight},
        "bias": {"bias": randn(40, seed=2, dtype=dtype), "norm_weight": norm_weight},
        "residual": {"residual": randn(INVARIANT_ROWS, 40, seed=2, dtype=dtype)},
    }[fused]
    chosen = tiles_of_product(16, 40, in_features, gated, 2, False)
    assert chosen.groups
    assert chosen.depth <= max(in_features, 64) <= chosen.depth + chosen.rest + 63
    whole = run(product, rows, weight, **parts)  # type: ignore[arg-type]
    assert_near(whole, run(product_reference, rows, weight, **parts))  # type: ignore[arg-type]
    few = parts | {"residual": parts["residual"][:3]} if fused == "residual" else parts  # type: ignore[index]
    with early_launches():
        assert torch.equal(run(product, rows[:3], weight, **few), whole[:3])  # type: ignore[arg-type]
