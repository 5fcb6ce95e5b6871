"""Weights in e4m3 with block scales: how they are made, kept and read, and what the product on them is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from spec_lab.__main__ import main
from spec_lab.checkpoints import keep_narrow
from spec_lab.checkpoints.checkpoint import open_tensors
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.keep_narrow import (
    SCALES,
    is_product,
    narrowed_to_fp8,
    widened_from_fp8,
    with_narrow_products,
    with_wide_products,
)
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from spec_lab.models.linear import NarrowLinear, make_linear
from spec_lab.models.target_loader import WeightSource
from spec_lab.record.reading import read_run
from tests.lab import make_pair
from tests.tiny_checkpoints import refused, rewrite_config, rewrite_tensors

FP8 = torch.float8_e4m3fn
CPU = torch.device("cpu")
CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
NAME = "model.layers.0.mlp.down_proj.weight"


def weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(128, 128), (200, 300), (576, 40), (3, 129)])
def test_a_number_is_off_by_half_a_step_of_its_block(shape: tuple[int, int]) -> None:
    """Three bits of mantissa: a 16th of the number; or half of the least denormal, 2**-9, times the scale."""
    wide = weight(*shape) * torch.logspace(-6, 2, shape[1])
    values, scales = narrowed_to_fp8(wide)
    assert values.dtype is FP8 and scales.shape == (shape[0], -(-shape[1] // 128))
    of_numbers = scales.repeat_interleave(128, dim=1)[:, : shape[1]]
    error = (widened_from_fp8(values, scales, torch.float32) - wide).abs()
    assert (error <= torch.maximum(wide.abs() / 16, of_numbers * 2**-10) * 1.0001).all()
    for row in range(0, shape[0], 128):
        for column in range(0, shape[1], 128):
            block = wide[row : row + 128, column : column + 128]
            assert scales[row, column // 128] == block.abs().max() / 448
            assert values[row : row + 128, column : column + 128].float().abs().max() == 448


def test_a_block_of_zeros_stays_one() -> None:
    values, scales = narrowed_to_fp8(torch.zeros(130, 130))
    assert not values.float().any() and scales.isfinite().all()


def test_a_product_is_that_of_the_numbers_that_are_kept() -> None:
    """Numbers off by up to a 16th, evenly, are off by a 28th in the mean of squares, and so is their product."""
    wide, rows, bias = weight(200, 300), weight(5, 300, 1), weight(1, 200, 2)[0]
    values, scales = narrowed_to_fp8(wide)
    linear = make_linear(values, bias, scales)
    assert isinstance(linear, NarrowLinear) and linear.weight.numel() * linear.weight.itemsize == 200 * 384
    got = linear(rows)
    assert torch.equal(got, F.linear(rows, widened_from_fp8(values, scales, torch.float32), bias))
    exact = F.linear(rows, wide, bias)
    assert 0.01 < (got - exact).norm() / exact.norm() < 1 / 28


def test_projections_that_blocks_do_not_divide_keep_scales_of_their_own() -> None:
    """q, k and v are one product: a block of its rows may have some of two projections."""
    pieces = [narrowed_to_fp8(weight(rows, 256, rows)) for rows in (128, 64, 200)]
    whole = make_linear(torch.cat([piece[0] for piece in pieces]), None, torch.cat([piece[1] for piece in pieces]))
    assert isinstance(whole, NarrowLinear) and whole.scales.shape == (392, 2)
    rows = weight(3, 256)
    assert torch.equal(
        whole(rows), F.linear(rows, torch.cat([widened_from_fp8(*piece, torch.float32) for piece in pieces]))
    )
    aligned = [narrowed_to_fp8(weight(rows, 256, rows)) for rows in (128, 256, 50)]
    fused = make_linear(torch.cat([piece[0] for piece in aligned]), None, torch.cat([piece[1] for piece in aligned]))
    assert isinstance(fused, NarrowLinear) and fused.scales.shape == (4, 2)


def test_products_of_layers_are_narrow_and_nothing_else() -> None:
    names = ["model.embed_tokens.weight", "lm_head.weight", NAME, "model.layers.0.self_attn.q_proj.bias"]
    names += ["model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"]
    assert [name for name in names if is_product(name)] == [NAME, "model.layers.0.self_attn.q_proj.weight"]
    tensors = with_narrow_products({name: weight(20, 30) for name in names}, keep_narrow.FP8)
    assert {name for name, tensor in tensors.items() if tensor.dtype is FP8} == {names[2], names[5]}
    assert set(tensors) - set(names) == {names[2].replace("weight", SCALES), names[5].replace("weight", SCALES)}
    again = with_wide_products(tensors, keep_narrow.FP8, torch.float32)
    assert set(again) == set(names) and torch.equal(again["lm_head.weight"], tensors["lm_head.weight"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_pair(tmp_path, "llama")[0]


def read(folder: Path, is_fp8: bool = True, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    source = WeightSource(folder, dtype, CPU, kept_in=keep_narrow.FP8 if is_fp8 else None)
    return dict(source.read(decoder_tensor_shapes(read_model_config(folder))))


def kept(folder: Path) -> dict[str, torch.Tensor]:
    shapes = decoder_tensor_shapes(read_model_config(folder))
    return dict(open_tensors(folder, shapes, torch.bfloat16, CPU, narrow=keep_narrow.FP8))


def test_on_a_cpu_products_have_the_values_of_e4m3_in_the_runs_dtype(folder: Path) -> None:
    plain, narrow = read(folder, is_fp8=False), read(folder)
    assert set(plain) == set(narrow) and all(tensor.dtype is torch.float32 for tensor in narrow.values())
    for name, tensor in plain.items():
        expected = widened_from_fp8(*narrowed_to_fp8(tensor), torch.float32) if is_product(name) else tensor
        assert torch.equal(narrow[name], expected)
        assert torch.equal(narrow[name], tensor) != is_product(name)


def make_fp8(folder: Path, scale: float = 0.01) -> dict[str, torch.Tensor]:
    """Make the products of a checkpoint fp8 in place, with numbers that do not reach 448; return what was written."""
    written = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if is_product(name):
            blocks = [-(-size // 128) for size in tensor.shape]
            written[name] = (tensor / scale).to(FP8)
            written[f"{name}_scale_inv"] = torch.full(blocks, scale)
            assert written[name].float().abs().max() < 448
    rewrite_tensors(folder, written)
    rewrite_config(folder, quantization_config=CONFIG)
    return written


def test_an_fp8_checkpoint_keeps_its_own_bytes_and_scales(folder: Path) -> None:
    written = make_fp8(folder)
    tensors = with_narrow_products(kept(folder), keep_narrow.FP8)
    for name, tensor in written.items():
        if tensor.dtype is FP8:
            assert torch.equal(tensors[name].view(torch.uint8), tensor.view(torch.uint8))
            assert torch.equal(tensors[f"{name}_scale_inv"], torch.full((len(tensor), 1), 0.01))
    auto, narrow = read(folder, is_fp8=False), read(folder)
    assert all(torch.equal(auto[name], narrow[name]) for name in auto)


def test_a_matrix_that_the_checkpoint_left_wide_is_made_narrow(folder: Path) -> None:
    """As `modules_to_not_convert` leaves some."""
    wide = load_file(folder / "model.safetensors")[NAME]
    make_fp8(folder)
    rewrite_tensors(folder, {NAME: wide}, drop=(f"{NAME}_scale_inv",))
    assert torch.equal(read(folder)[NAME], widened_from_fp8(*narrowed_to_fp8(wide), torch.float32))


def test_truncated_scales_are_refused(folder: Path) -> None:
    make_fp8(folder)
    rewrite_tensors(folder, {f"{NAME}_scale_inv": torch.ones(0, 1)})
    with refused(f"{NAME}_scale_inv is [0, 1]", "same checkpoint"):
        kept(folder)


def test_blocks_of_another_width_are_refused(folder: Path) -> None:
    written = make_fp8(folder)
    halves = {name: tensor.repeat(1, 2) for name, tensor in written.items() if name.endswith(SCALES)}
    sizes = {name: -(-written[name.removesuffix("_scale_inv")].shape[1] // 20) for name in halves}
    rewrite_tensors(folder, {name: torch.full((1, sizes[name]), 0.01) for name in halves})
    rewrite_config(folder, quantization_config=CONFIG | {"weight_block_size": [128, 20]})
    with refused("inputs in a block 20"):
        kept(folder)
    read(folder, is_fp8=False)


def test_nan_in_fp8_is_refused(folder: Path) -> None:
    make_fp8(folder)
    broken = load_file(folder / "model.safetensors")[NAME].view(torch.uint8).clone()
    broken[3, 4] = 0xFF
    rewrite_tensors(folder, {NAME: broken.view(FP8)})
    with refused(NAME, "NaN"):
        kept(folder)


def test_speculative_output_is_plain_decodings_on_an_fp8_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both decode with the narrow target, and so does the audit."""
    monkeypatch.chdir(tmp_path)
    cheap = ["workload.limit=2", "max_new_tokens=24", "references=[plain]", "repeats=1", "profile_rounds=0"]
    assert main(["target.weight_dtype=fp8", "prune=catchup", *cheap]) == 0
    (path,) = tmp_path.glob("outputs/*/summary.json")
    assert "weight_dtype_fp8" in path.parent.name
    summary = read_run(path.parent)
    assert summary.target.weights == "fp8, rounded when read from float32"
    assert summary["equal_to_plain"] == 1 and summary["divergence.bugs"] == 0
    assert summary["acceptance_length"] > 1.5
