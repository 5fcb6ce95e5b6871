"""Drafters whose matrices lie in e4m3 with a scale for each block: what is read, what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_lab.checkpoints.block_checkpoint import load_block
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.eagle3_checkpoint import load_eagle3
from spec_lab.checkpoints.families import read_model_config
from tests.test_fp8_checkpoint import quantise
from tests.tiny_blocks import TINY_PRESETS, TinyBlock, make_tiny_p_eagle, write_block
from tests.tiny_checkpoints import make_tiny_target, refused, rewrite_config, rewrite_tensors

BLOCKS = {
    **TINY_PRESETS,
    "several blocks": TinyBlock(head="markov", rank=40),
    "speculators": TinyBlock(layout="speculators", head="markov", rank=40, draft_vocab_size=140),
}
MATRIX = "layers.0.mlp.up_proj.weight"


SCHEME = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def store_in_fp8(folder: Path) -> None:
    """Write the large matrices of a folder in e4m3 with their scales, in place."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if tensor.is_floating_point() and tensor.ndim == 2 and min(tensor.shape) >= 32 and "conv" not in name:
            tensors[name], tensors[f"{name}_scale_inv"], _ = quantise(tensor, (128, 128))
    save_file(tensors, folder / "model.safetensors")
    rewrite_config(folder, quantization_config=SCHEME)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("target")
    make_tiny_target(folder, "qwen3")
    return read_model_config(folder)


@pytest.fixture
def folder(target: ModelConfig, tmp_path: Path) -> Path:
    write_block(tmp_path, TinyBlock(), target)
    store_in_fp8(tmp_path)
    return tmp_path


def assert_narrow(wide: dict[str, torch.Tensor], read: dict[str, torch.Tensor], folder: Path) -> None:
    """What is read is value * scale, block by block, of what was written; the rest is as it was."""
    stored = load_file(folder / "model.safetensors")
    narrow = {name for name, tensor in stored.items() if tensor.dtype is torch.float8_e4m3fn}
    assert {name.removesuffix("_scale_inv") for name in stored if name.endswith("_scale_inv")} == narrow != set()
    assert all(wide[name].ndim == 2 and "conv" not in name for name in narrow)
    assert read.keys() == wide.keys()
    for name, tensor in wide.items():
        assert torch.equal(read[name], quantise(tensor, (128, 128))[2] if name in narrow else tensor), name


@pytest.mark.parametrize("name", BLOCKS)
def test_a_narrow_block_drafter_is_what_its_scales_say(target: ModelConfig, tmp_path: Path, name: str) -> None:
    write_block(tmp_path / "wide", BLOCKS[name], target)
    shutil.copytree(tmp_path / "wide", tmp_path / "narrow")
    store_in_fp8(tmp_path / "narrow")
    config, wide = load_block(tmp_path / "wide", target, torch.float32, "cpu")
    same, read = load_block(tmp_path / "narrow", target, torch.float32, "cpu")
    assert same == config
    assert_narrow(wide, read, tmp_path / "narrow")


def test_a_narrow_p_eagle_head_is_what_its_scales_say(target: ModelConfig, tmp_path: Path) -> None:
    make_tiny_p_eagle(tmp_path / "wide", target)
    shutil.copytree(tmp_path / "wide", tmp_path / "narrow")
    store_in_fp8(tmp_path / "narrow")
    (_, wide), (_, read) = (
        load_eagle3(tmp_path / each, target, torch.float32, "cpu", "peagle") for each in ("wide", "narrow")
    )
    assert {*read} == {*wide} and not torch.equal(read["fc.weight"], wide["fc.weight"])
    assert torch.equal(read["fc.weight"], quantise(wide["fc.weight"], (128, 128))[2])


@pytest.mark.parametrize(
    ("scales", "named"),
    [
        (torch.ones(2, 1), f"{MATRIX}_scale_inv is [2, 1], which does not fit"),
        (torch.full((1, 1), float("nan")), f"{MATRIX} has values of inf"),
    ],
    ids=["shape", "nan"],
)
def test_wrong_scales_are_refused(target: ModelConfig, folder: Path, scales: torch.Tensor, named: str) -> None:
    rewrite_tensors(folder, {f"{MATRIX}_scale_inv": scales})
    with refused(folder, named):
        load_block(folder, target, torch.float32, "cpu")


def test_scales_that_no_config_tells_of_are_refused(target: ModelConfig, folder: Path) -> None:
    rewrite_config(folder, drop=("quantization_config",))
    with refused(folder, "not expected", "_scale_inv"):
        load_block(folder, target, torch.float32, "cpu")
