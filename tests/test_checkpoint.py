"""Tensors of random tiny checkpoints that transformers wrote, and every kind of broken folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_lab.checkpoints.checkpoint import open_tensors, refuse_impossible
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from tests.tiny_checkpoints import Family, make_tiny_target, refused, rewrite_tensors

KINDS: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_tied_biases": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
}


def load(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return dict(open_tensors(folder, decoder_tensor_shapes(read_model_config(folder)), dtype, "cpu"))


@pytest.mark.parametrize("max_shard_size", ["5GB", "30KB"])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_equal_the_ones_transformers_saved(tmp_path: Path, kind: str, max_shard_size: str) -> None:
    family, options = KINDS[kind]
    model = make_tiny_target(tmp_path, family, max_shard_size=max_shard_size, **options)
    assert (tmp_path / "model.safetensors").exists() == (max_shard_size == "5GB")
    expected = dict(model.state_dict())
    if options.get("tie_word_embeddings"):
        del expected["lm_head.weight"]
    tensors = load(tmp_path)
    assert list(tensors) == list(decoder_tensor_shapes(read_model_config(tmp_path)))
    assert set(tensors) == set(expected)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_casts_to_the_asked_dtype(tmp_path: Path) -> None:
    model = make_tiny_target(tmp_path, "qwen3", max_shard_size="30KB")
    tensors = load(tmp_path, torch.bfloat16)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    weight = model.state_dict()["model.norm.weight"]
    assert torch.equal(tensors["model.norm.weight"], weight.to(torch.bfloat16))


def test_tensors_outlive_a_rewritten_file(tmp_path: Path) -> None:
    """In place, as a training stage does: a tensor still mapped to the file would read zeros."""
    model = make_tiny_target(tmp_path, "llama")
    tensors = load(tmp_path)
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as handle:
        handle.seek(file.stat().st_size // 2)
        handle.write(bytes(file.stat().st_size // 2))
    assert all(torch.equal(tensors[name], weight) for name, weight in model.state_dict().items())


def test_old_exports_rotary_buffers_and_stored_tied_head_are_ignored(tmp_path: Path) -> None:
    model = make_tiny_target(tmp_path, "llama", tie_word_embeddings=True)
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite_tensors(tmp_path, {buffer: torch.ones(8), "lm_head.weight": model.lm_head.weight.detach()})
    assert {buffer, "lm_head.weight"} <= set(load_file(tmp_path / "model.safetensors"))
    assert buffer not in load(tmp_path)
    assert "lm_head.weight" not in load(tmp_path)


def test_refuses_a_tied_head_that_differs(tmp_path: Path) -> None:
    model = make_tiny_target(tmp_path, "llama", tie_word_embeddings=True)
    rewrite_tensors(tmp_path, {"lm_head.weight": model.lm_head.weight.detach() + 1})
    with refused(tmp_path, "ties lm_head"):
        load(tmp_path)


def test_refuses_tensors_that_do_not_fit_in_one_line(tmp_path: Path) -> None:
    make_tiny_target(tmp_path, "qwen3")
    changes = {
        "model.layers.1.self_attn.k_proj.weight": torch.zeros(48, 32),
        "model.layers.8.input_layernorm.weight": torch.zeros(32),
    }
    rewrite_tensors(tmp_path, changes, drop=("model.norm.weight", "model.layers.7.mlp.up_proj.weight"))
    with refused(
        tmp_path,
        "2 missing: model.layers.7.mlp.up_proj.weight, model.norm.weight",
        "1 of another shape: model.layers.1.self_attn.k_proj.weight is [48, 32], its config says [32, 32]",
        "1 not expected: model.layers.8.input_layernorm.weight",
    ):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_refuses_quantized_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    make_tiny_target(tmp_path, "llama")
    rewrite_tensors(tmp_path, {"model.norm.weight": torch.ones(32).to(dtype)})
    with refused(tmp_path, "quantized", "model.norm.weight"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.3.mlp.up_proj.weight", "lm_head.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, name: str, value: float) -> None:
    """One value of one tensor is enough, in any dtype, and its shard is named."""
    make_tiny_target(tmp_path, "llama", max_shard_size="30KB")
    shard = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors = load_file(tmp_path / shard)
    tensors[name][-1, -1] = value
    save_file(tensors, tmp_path / shard, metadata={"format": "pt"})
    for dtype in (torch.float32, torch.bfloat16):
        with refused(f"{tmp_path / shard}: {name} has values of inf "):
            load(tmp_path, dtype)


@pytest.mark.parametrize("factor", [1e30, -1e30, 1e12])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_weights_that_no_trained_model_has_are_refused(name: str, factor: float, tmp_path: Path) -> None:
    make_tiny_target(tmp_path, "llama")
    weight = load_file(tmp_path / "model.safetensors")[name]
    rewrite_tensors(tmp_path, {name: weight * factor})
    for dtype in (torch.float32, torch.bfloat16):
        with refused(f"model.safetensors: {name} has values of ", "which no trained model has"):
            load(tmp_path, dtype)
    rewrite_tensors(tmp_path, {name: weight * 1e3})
    load(tmp_path, torch.float32)


def test_a_matrix_of_zeros_is_a_download_that_stopped(tmp_path: Path) -> None:
    """A file that was given its size first has zeros where nothing came. What a layer ends with may be begun so."""
    name, begun = "model.layers.7.mlp.up_proj.weight", "model.layers.7.mlp.down_proj.weight"
    make_tiny_target(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    rewrite_tensors(tmp_path, {name: torch.zeros_like(tensors[name])})
    with refused(f"model.safetensors: {name} has all zeros"):
        load(tmp_path, torch.float32)
    bits = torch.zeros(2, 2).to(torch.float8_e4m3fn)
    with refused("all zeros"):
        refuse_impossible(bits, bits, tmp_path, name)
    bits[1, 1] = 2**-9
    refuse_impossible(bits, bits, tmp_path, name)
    rewrite_tensors(tmp_path, {name: tensors[name], begun: torch.zeros_like(tensors[begun])})
    load(tmp_path, torch.float32)


def test_weights_past_the_dtype_of_the_run_are_refused(tmp_path: Path) -> None:
    make_tiny_target(tmp_path, "llama")
    rewrite_tensors(tmp_path, {"model.norm.weight": torch.full((32,), 1e5)})
    load(tmp_path, torch.bfloat16)
    with refused("model.safetensors: model.norm.weight has values of inf in torch.float16, 1e+05 in the file"):
        load(tmp_path, torch.float16)
