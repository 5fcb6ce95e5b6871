"""fp8 checkpoints with a scale a block, as DeepSeek-V3's: dequantised when they are read, and other ones refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_lab.checkpoints.checkpoint import open_tensors, read_tensors, stored_tensors
from spec_lab.checkpoints.checkpoint_files import Part
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.mtp_checkpoint import load_mtp
from spec_lab.checkpoints.quantised import Fp8Blocks
from spec_lab.checkpoints.target_tensors import without_mtp
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from spec_lab.models.partition import Partition
from tests.tiny_checkpoints import refused, rewrite_config, rewrite_tensors
from tests.tiny_experts import add_nextn
from tests.tiny_latent import make_latent_target

FP8 = torch.float8_e4m3fn
BLOCK = (16, 20)
CONFIG: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
}


def blocks(shape: torch.Size, block: tuple[int, int]) -> list[tuple[int, int, slice, slice]]:
    """The number and the place of each block, those at the edges cut off."""
    starts = [(row, column) for row in range(0, shape[0], block[0]) for column in range(0, shape[1], block[1])]
    return [
        (row // block[0], column // block[1], slice(row, row + block[0]), slice(column, column + block[1]))
        for row, column in starts
    ]


def quantise(weight: torch.Tensor, block: tuple[int, int] = BLOCK) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An fp8 matrix, its scales, and what both stand for, block by block."""
    numbers = [-(-size // of) for size, of in zip(weight.shape, block, strict=True)]
    quantised, scales, meant = weight.to(FP8), torch.zeros(numbers), torch.zeros_like(weight)
    for i, j, rows, columns in blocks(weight.shape, block):
        scales[i, j] = weight[rows, columns].abs().max() / 448
        quantised[rows, columns] = (weight[rows, columns] / scales[i, j]).to(FP8)
        meant[rows, columns] = quantised[rows, columns].float() * scales[i, j]
    return quantised, scales, meant


def quantise_checkpoint(folder: Path, block: tuple[int, int] = BLOCK) -> dict[str, torch.Tensor]:
    """Make the products of the layers fp8, in place; return every tensor as it is meant."""
    tensors = load_file(folder / "model.safetensors")
    changes, meant = {}, dict(tensors)
    for name, tensor in tensors.items():
        if "_proj" in name and tensor.dim() == 2:
            changes[name], changes[f"{name}_scale_inv"], meant[name] = quantise(tensor, block)
    rewrite_tensors(folder, changes)
    rewrite_config(folder, quantization_config=CONFIG | {"weight_block_size": list(block)})
    return meant


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make_latent_target(tmp_path, first_k_dense_replace=2, num_hidden_layers=2)
    return tmp_path


def load(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    shapes = decoder_tensor_shapes(read_model_config(folder))
    return dict(open_tensors(folder, shapes, options.pop("dtype", torch.float32), "cpu", own=without_mtp, **options))


@pytest.mark.parametrize("shape", [(192, 256), (576, 512), (200, 130), (128, 128), (3, 500)])
def test_the_published_blocks_with_begun_ones_at_the_edges(shape: tuple[int, int]) -> None:
    """transformers 5 takes rows / scales for the size of a block, which is 96 for 192 rows."""
    quantised, scales, meant = quantise(torch.randn(shape), (128, 128))
    assert torch.equal(Fp8Blocks(128, 128)(quantised, scales), meant)


def test_a_checkpoint_is_what_its_scales_say(checkpoint: Path) -> None:
    meant = quantise_checkpoint(checkpoint)
    tensors = load(checkpoint)
    assert all(torch.equal(tensors[name], meant[name]) for name in meant) and set(tensors) == set(meant)
    rows = tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].shape[0]
    assert rows % BLOCK[0], "a begun block"
    halves = load(checkpoint, dtype=torch.bfloat16)
    assert all(torch.equal(halves[name], meant[name].bfloat16()) for name in meant)


def test_experts_one_by_one_and_a_module_behind_the_trunk(tmp_path: Path) -> None:
    """As DeepSeek-V3 has both: each expert with scales of its own, and the products of the NextN module but eh_proj."""
    model = make_latent_target(tmp_path, num_hidden_layers=2, num_nextn_predict_layers=1)
    add_nextn(tmp_path, model)
    tensors = load_file(tmp_path / "model.safetensors")
    plain = {name: tensor for name, tensor in tensors.items() if "eh_proj" in name or tensor.dim() == 3}
    meant = quantise_checkpoint(tmp_path)
    rewrite_tensors(tmp_path, plain, drop=tuple(f"{name}_scale_inv" for name in plain))
    loaded = load(tmp_path)["model.layers.1.mlp.experts.gate_up_proj"]
    for expert, gate_up in enumerate(loaded):
        prefix = f"model.layers.1.mlp.experts.{expert}"
        parts = [meant[f"{prefix}.{part}_proj.weight"] for part in ("gate", "up")]
        assert torch.equal(gate_up, torch.cat(parts))
    _, (module,) = load_mtp(tmp_path, read_model_config(tmp_path), 1, torch.float32, "cpu")
    name = "self_attn.kv_a_proj_with_mqa.weight"
    assert torch.equal(module[name], meant[f"model.layers.2.{name}"])
    assert torch.equal(module["eh_proj.weight"], plain["model.layers.2.eh_proj.weight"])


def test_scales_in_another_file(checkpoint: Path) -> None:
    """An index may place them anywhere."""
    meant = quantise_checkpoint(checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    files = {name: "b.safetensors" if name.endswith("_scale_inv") else "a.safetensors" for name in tensors}
    for file in ("a.safetensors", "b.safetensors"):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, checkpoint / file)
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    got = load(checkpoint)
    assert all(torch.equal(got[name], meant[name]) for name in meant)


def test_a_part_of_a_matrix_is_a_part_of_what_it_stands_for(checkpoint: Path) -> None:
    """Its border need not be one of a block."""

    class LowerRows(Partition):
        def part(self, name: str, shape: tuple[int, ...]) -> Part | None:
            return (slice(7, None),) if "up_proj" in name else None

    meant = quantise_checkpoint(checkpoint)
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(load(checkpoint, slices=LowerRows())[name], meant[name][7:])


def test_indexers_of_sparse_attention_are_left_out(checkpoint: Path) -> None:
    quantise_checkpoint(checkpoint)
    name = "model.layers.0.self_attn.indexer.wk.weight"
    quantised, scales, _ = quantise(torch.randn(32, 32))
    rewrite_tensors(checkpoint, {name: quantised, f"{name}_scale_inv": scales})
    assert name not in stored_tensors(checkpoint) and name not in load(checkpoint)


def test_refuses_scales_of_another_block(checkpoint: Path) -> None:
    quantise_checkpoint(checkpoint)
    rewrite_config(checkpoint, quantization_config=CONFIG | {"weight_block_size": [128, 128]})
    with refused("_scale_inv is [", "blocks of [128, 128]", "same checkpoint"):
        load(checkpoint)


def test_refuses_a_matrix_without_scales(checkpoint: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    quantise_checkpoint(checkpoint)
    rewrite_tensors(checkpoint, {}, drop=(f"{name}_scale_inv",))
    with refused("of fewer than 16 bits", f"{name} is F8_E4M3"):
        load(checkpoint)


def test_nan_in_scales_is_refused(checkpoint: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    quantise_checkpoint(checkpoint)
    scales = load_file(checkpoint / "model.safetensors")[f"{name}_scale_inv"]
    rewrite_tensors(checkpoint, {f"{name}_scale_inv": torch.full_like(scales, float("nan"))})
    stored = stored_tensors(checkpoint)
    with refused(name, "NaN"):
        read_tensors({name: stored[name]}, torch.float32, "cpu")


@pytest.mark.parametrize("quantization", [{"quant_method": "awq", "bits": 4}, {"quant_method": "fp8"}, {}])
def test_refuses_scales_of_which_the_config_says_nothing(checkpoint: Path, quantization: dict[str, Any]) -> None:
    quantise_checkpoint(checkpoint)
    rewrite_config(checkpoint, quantization_config=quantization)
    with refused(checkpoint, "not expected", "_scale_inv"):
        load(checkpoint)
