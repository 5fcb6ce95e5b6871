"""Checkpoints of Qwen3.5 and Qwen3-Next: both layouts, both places of the config, what is kept in float32, refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.build.caches import build_cache
from spec_lab.build.limits import Limits
from spec_lab.build.models import load_models
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families import read_decoder, read_model_config
from spec_lab.checkpoints.gemma4_assistant_checkpoint import owns_kv
from spec_lab.checkpoints.packaged import SHAPES
from spec_lab.checkpoints.target_tensors import counts_from_one
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from spec_lab.config.choices import CacheDtype
from spec_lab.core.kernel_set import TORCH_FORMS
from spec_lab.models.target_loader import WeightSource, load_target, read_target
from spec_lab.models.tensor_parallel import TensorParallel
from spec_lab.options.trees import StaticTreeConfig
from tests.lab import make_config, make_engine, random_requests
from tests.tiny_checkpoints import refused, rewrite_tensors
from tests.tiny_hybrid import SIZES, VOCAB, make_tiny_hybrid

CPU = torch.device("cpu")
FLAT: dict[str, Any] = SIZES | {"model_type": "qwen3_5_text"}


def read(folder: Path, dtype: torch.dtype = torch.float32) -> Mapping[str, torch.Tensor]:
    return read_target(read_model_config(folder), WeightSource(folder, dtype, CPU))


def test_a_checkpoint_of_the_hub_has_two_dtypes(tmp_path: Path) -> None:
    """A_log and the delta nets' norms are float32 beside bfloat16; in memory A_log, dt_bias and the sums 1 + w of the
    other norms are."""
    make_tiny_hybrid(tmp_path, "qwen3_5_with_vision")
    stored = load_file(tmp_path / "model.safetensors")
    kept = (".A_log", ".linear_attn.norm.weight")
    halves = {name: tensor if name.endswith(kept) else tensor.bfloat16() for name, tensor in stored.items()}
    rewrite_tensors(tmp_path, halves)
    tensors = read(tmp_path, torch.bfloat16)
    float32 = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert float32 == {name for name in tensors if name.endswith((".A_log", ".dt_bias")) or counts_from_one(name)}
    drawn = read_target(read_model_config(tmp_path), WeightSource(None, torch.bfloat16, CPU))
    assert float32 == {name for name, tensor in drawn.items() if tensor.dtype == torch.float32}
    prefix = "model.language_model.layers.0."
    assert torch.equal(tensors["model.layers.0.linear_attn.A_log"], stored[prefix + "linear_attn.A_log"])
    norm = halves[prefix + "input_layernorm.weight"]
    assert torch.equal(tensors["model.layers.0.input_layernorm.weight"], 1 + norm.float())
    assert torch.equal(
        tensors["model.layers.0.linear_attn.norm.weight"], stored[prefix + "linear_attn.norm.weight"].bfloat16()
    )


def test_norms_of_a_bfloat16_target_round_once(tmp_path: Path) -> None:
    """Those of a layer, and of queries and keys; the weights are not rounded before."""
    make_tiny_hybrid(tmp_path)
    config = read_model_config(tmp_path)
    target = load_target(config, WeightSource(tmp_path, torch.bfloat16, CPU), TorchAttention(4, 8), 8)
    stored = load_file(tmp_path / "model.safetensors")
    layer: Any = target.layers[3]
    norms: dict[str, Any] = {
        "layers.3.input_layernorm": layer.norm,
        "layers.3.post_attention_layernorm": layer.close.norm,
        "layers.3.self_attn.q_norm": layer.mixer.rope_and_write.qk_norm,
    }
    for name, norm in norms.items():
        weight = stored[f"model.{name}.weight"]
        rows = torch.randn(6, len(weight), generator=torch.Generator().manual_seed(0)).bfloat16()
        exact = torch.nn.functional.rms_norm(rows.float(), rows.shape[1:], None, config.rms_norm_eps) * (1 + weight)
        assert torch.equal(norm(rows)[:4], exact[:4].bfloat16()), name


def test_a_tied_head_and_end_tokens_of_a_nested_config(tmp_path: Path) -> None:
    text = FLAT | {"eos_token_id": 5, "tie_word_embeddings": False}
    nested = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text, "tie_word_embeddings": True}
    config = read_decoder(nested, "config.json")
    assert config.tie_word_embeddings and config.eos_token_ids == (5,)
    (tmp_path / "config.json").write_text(json.dumps(nested))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert read_model_config(tmp_path).eos_token_ids == (7, 5)


def test_a_state_is_in_the_way_of_trees_draft_models_and_ranks(tmp_path: Path) -> None:
    make_tiny_hybrid(tmp_path)
    requests = random_requests(1, 4, vocab_size=VOCAB)
    config = make_config((tmp_path, tmp_path), "draft_model", 2)
    with refused(tmp_path, "rejected drafts would stay", "drafter.path"):
        make_engine(config, requests)
    tree = replace(make_config((tmp_path, tmp_path), "none"), tree=StaticTreeConfig(paths=[[0], [1]]))
    with refused("tree=static", "branches cannot share", "tree=none"):
        load_models(tree, 40)
    plan = read_model_config(tmp_path).layers[0]
    with refused("target.tensor_parallel=2", "keep a state", "target.tensor_parallel=1"):
        TensorParallel(0, 2, None).share(plan)  # type: ignore[arg-type]
    assert not owns_kv(plan), "no assistant reads keys where there are none"


def test_slots_have_a_state_for_each_verify_row() -> None:
    sizes = {"linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    target: ModelConfig = read_decoder(FLAT | sizes, "config.json")
    models: Any = type("M", (), {"dtype": torch.float32, "device": CPU, "kernels": TORCH_FORMS})
    limits = Limits(1, 32, 8, 16, 200, 32, num_rows=4)
    cache = build_cache(target.layers, limits, models, CacheDtype.auto)
    kept: tuple[Any, ...] = cache.recurrent
    assert [tuple(states.states.shape) for states in kept] == [(2, 4, 32, 128, 128)] * 3
    assert {states.windows.inputs.shape[1] for states in kept} == {3 + 3}


@pytest.mark.parametrize(("name", "billions", "num_nets"), [("qwen3_5_9b", 9, 24), ("qwen3_5_35b_a3b", 35, 30)])
def test_a_shape_has_the_size_of_its_name(name: str, billions: int, num_nets: int) -> None:
    config = read_model_config(SHAPES / name)
    total = sum(prod(shape) for shape in decoder_tensor_shapes(config).values())
    assert total / 1e9 == pytest.approx(billions, rel=0.02)
    assert sum(plan.delta_net is not None for plan in config.layers) == num_nets
    assert config.eos_token_ids == (248044, 248046)
