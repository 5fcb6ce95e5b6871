"""Queries, keys and values of a few rows, projected, turned and written in one launch, against product and rotation."""

from __future__ import annotations

import pytest
import torch

from spec_kernels.block_fp8_reference import packed
from spec_kernels.product import product
from spec_kernels.product_tiles import INVARIANT_ROWS, SkinnyTiles
from spec_kernels.project_heads import project_heads
from spec_kernels.rope_write import rope_write
from tests.kernel_lab import DEVICE, DTYPES, assert_near, randn

EPS = 1e-5
NUM_SLOTS = 24


def weights(num_heads: int, num_kv_heads: int, head_dim: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    return (randn((num_heads + 2 * num_kv_heads) * head_dim, in_features, seed=1) * in_features**-0.5).to(dtype)


def run(
    function: object,
    rows: torch.Tensor,
    weight: torch.Tensor,
    sizes: tuple[int, int, int],
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and the cache, which is NaN before; a row's angles and slot follow from its place."""
    (_, num_kv_heads, head_dim), num_rows = sizes, rows.shape[0]
    kv = torch.full((NUM_SLOTS, 2, num_kv_heads, head_dim), float("nan"), dtype=rows.dtype, device=DEVICE)
    half = randn(INVARIANT_ROWS, 2, head_dim // 2, dtype=rows.dtype, seed=7)[:num_rows]
    turns = torch.stack((half[:, 0].repeat(1, 2), torch.cat((-half[:, 1], half[:, 1]), dim=1)), dim=1)
    slots = torch.arange(NUM_SLOTS - 1, NUM_SLOTS - 1 - num_rows, -1, device=DEVICE)
    arrivals = torch.zeros(weight.shape[0], dtype=torch.int32, device=DEVICE)
    parts = arrivals, bias, norm_weight, EPS, turns[:, 0], turns[:, 1], slots
    queries = function(kv, rows, weight, *parts, scales)  # type: ignore[operator]
    assert not arrivals.any(), "the last split leaves zeros"
    return queries, kv


def in_two_launches(
    kv: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    arrivals: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    projected = product(rows, weight, arrivals, bias, norm_weight, eps, None, False, scales=scales)
    heads = projected.unflatten(1, (-1, kv.shape[3]))
    return rope_write(heads.shape[1] - 2 * kv.shape[2], kv, heads, cos, signed_sin, slot_mapping)


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> object:
    """Choose the tiles by hand, so that small sizes have several of them."""

    def use(columns: int, splits: int, turned: bool = False, depth: int = 16) -> None:
        chosen = SkinnyTiles(columns, depth, splits, stages=2, turned=turned)
        for module in ("product", "project_heads"):
            monkeypatch.setattr(f"spec_kernels.{module}.tiles_of_product", lambda *_, **__: chosen)

    return use


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "sizes", "columns", "splits"),
    [
        (1, (4, 2, 16), 16, 1),
        (5, (2, 1, 32), 16, 2),
        (16, (2, 2, 8), 32, 4),
        (3, (3, 1, 24), 16, 2),
        (2, (1, 1, 8), 64, 1),
    ],
)
def test_heads_equal_those_of_two_launches(
    tiles: object, dtype: torch.dtype, num_rows: int, sizes: tuple[int, int, int], columns: int, splits: int
) -> None:
    """Tiles of a head, of parts of one and of several, whole or not, over rows that are a view of wider ones."""
    tiles(columns, splits, turned=splits == 2)  # type: ignore[operator]
    rows, weight = randn(num_rows, 72, dtype=dtype)[:, :64], weights(*sizes, 64, dtype)
    parts = {
        "bias": randn(weight.shape[0], dtype=dtype, seed=2) if splits == 1 else None,
        "norm_weight": randn(64, seed=3) if splits > 1 else None,
    }
    for got, expected in zip(
        run(project_heads, rows, weight, sizes, **parts),
        run(in_two_launches, rows, weight, sizes, **parts),
        strict=True,
    ):
        assert torch.equal(got.isnan(), expected.isnan()), "slots of other rows stay as they are"
        assert_near(got.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "in_features", "columns", "depth"),
    [((2, 1, 16), 64, 16, 16), ((1, 1, 128), 256, 64, 128), ((2, 1, 16), 72, None, None)],
)
def test_heads_are_those_of_two_launches_and_do_not_depend_on_the_rows_beside_them(
    tiles: object,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    in_features: int,
    columns: int | None,
    depth: int | None,
) -> None:
    """Bit for bit: a prompt's rows go through the two launches. The wide tile is that of a layer of Llama-3.1-8B, where
    the compiler has several pairs a thread; without one the tiles are those of a small weight."""
    if columns is not None:
        tiles(columns, 2, turned=columns == 64, depth=depth)  # type: ignore[operator]
    rows, weight = randn(INVARIANT_ROWS, in_features, dtype=dtype), weights(*sizes, in_features, dtype)
    norm_weight = randn(in_features, seed=3)
    queries, kv = run(project_heads, rows, weight, sizes, norm_weight=norm_weight)
    for got, expected in zip(
        (queries, kv), run(in_two_launches, rows, weight, sizes, norm_weight=norm_weight), strict=True
    ):
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    for num_rows in (1, 6):
        fewer, written = run(project_heads, rows[:num_rows], weight, sizes, norm_weight=norm_weight)
        assert torch.equal(fewer, queries[:num_rows])
        assert torch.equal(written[-num_rows:], kv[-num_rows:])


@pytest.mark.parametrize("scale_rows", [128, 1])
@pytest.mark.parametrize("head_dim", [16, 128])
def test_heads_of_a_weight_in_e4m3_are_those_of_two_launches(head_dim: int, scale_rows: int) -> None:
    """Every block, or every row, has a scale of its own; several heads are in a block, or one."""
    num_kv_heads = 1 if head_dim == 128 else 4
    sizes = 128 // head_dim, num_kv_heads, head_dim
    weight = randn((sizes[0] + 2 * num_kv_heads) * head_dim, 128, seed=1).to(torch.float8_e4m3fn)
    scales = (randn(-(-weight.shape[0] // scale_rows), 1, seed=5).abs() + 0.5) / 12
    rows = randn(3, 128, dtype=torch.float16)
    parts = {"norm_weight": randn(128, seed=3), "scales": scales}
    got, expected = (
        run(function, rows, packed(weight), sizes, **parts)  # type: ignore[arg-type]
        for function in (project_heads, in_two_launches)
    )
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
