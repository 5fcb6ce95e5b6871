"""MTP modules of every family, loaded under the exact names of each. What they compute: `test_mtp_drafter.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families import read_decoder, read_model_config
from spec_lab.checkpoints.mtp_checkpoint import load_mtp, num_mtp_modules
from spec_lab.checkpoints.packaged import ZOO
from tests.tiny_checkpoints import TINY_SIZES, refused, rewrite_config, rewrite_tensors
from tests.tiny_mtp import FAMILIES, TinyMtp, make_tiny_mtp

TARGET = read_decoder(TINY_SIZES | {"model_type": "qwen3", "head_dim": 16}, "target")


@pytest.mark.parametrize("family", FAMILIES)
def test_several_modules_come_in_order(tmp_path: Path, family: str) -> None:
    """Qwen's modules share their norms and projection. A part of them can be asked for."""
    references = make_tiny_mtp(tmp_path, family, TARGET, num_modules=3)
    _, tensors = load_mtp(tmp_path, TARGET, 2, torch.float32, "cpu")
    assert len(tensors) == 2
    for reference, loaded in zip(references, tensors, strict=False):
        assert torch.equal(loaded["mlp.up_proj.weight"], reference.layer.mlp.up_proj.weight)
    assert not torch.equal(tensors[0]["mlp.up_proj.weight"], tensors[1]["mlp.up_proj.weight"])
    with refused(tmp_path, "has fewer MTP modules than the 4 that are needed"):
        load_mtp(tmp_path, TARGET, 4, torch.float32, "cpu")


def assert_loaded(folder: Path, reference: TinyMtp) -> None:
    _, (tensors,) = load_mtp(folder, TARGET, 1, torch.float32, "cpu")
    assert torch.equal(tensors["mlp.up_proj.weight"], reference.layer.mlp.up_proj.weight)


def test_copies_of_the_embedding_and_the_head_are_skipped(tmp_path: Path) -> None:
    (reference,) = make_tiny_mtp(tmp_path, "deepseek_names", TARGET)
    copies = {f"model.layers.8.{name}.weight": torch.zeros(160, 32) for name in ("embed_tokens", "shared_head.head")}
    rewrite_tensors(tmp_path, copies)
    assert_loaded(tmp_path, reference)


def test_a_trunk_is_not_looked_at(tmp_path: Path) -> None:
    (reference,) = make_tiny_mtp(tmp_path, "qwen3_5", TARGET)
    rewrite_tensors(tmp_path, {"model.layers.7.linear_attn.A_log": torch.zeros(3, dtype=torch.int8)})
    assert_loaded(tmp_path, reference)


def test_a_null_of_the_config_keeps_its_meaning() -> None:
    """`q_lora_rank` is null where queries have one product."""
    config, _ = load_mtp(ZOO / "pocket_moe-mtp_eagle", read_model_config(ZOO / "pocket_moe"), 1, torch.float32, "cpu")
    latent = config.layer.only_layer.latent
    assert latent is not None and latent.q_lora_rank is None


def test_zero_centred_norms_are_not_rounded(tmp_path: Path) -> None:
    (reference,) = make_tiny_mtp(tmp_path, "qwen3_5", TARGET)
    _, (tensors,) = load_mtp(tmp_path, TARGET, 1, torch.bfloat16, "cpu")
    folded = tensors["self_attn.k_norm.weight"]
    assert folded.dtype == torch.float32 and tensors["self_attn.k_proj.weight"].dtype == torch.bfloat16
    assert torch.equal(folded, 1 + reference.layer.self_attn.k_norm.weight)


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({}, 0),
        ({"num_nextn_predict_layers": 0}, 0),
        ({"num_nextn_predict_layers": 3}, 3),
        ({"text_config": {"mtp_num_hidden_layers": 1}}, 1),
    ],
)
def test_how_many_modules_a_config_names(config: dict[str, Any], count: int) -> None:
    assert num_mtp_modules(config) == count


def load(folder: Path, target: ModelConfig = TARGET) -> None:
    load_mtp(folder, target, 1, torch.float32, "cpu")


def test_latent_attention_by_its_tensors_and_not_by_its_name(tmp_path: Path) -> None:
    """DeepSeek's class may stand over a grouped-query module, as in `deepseek_names`, and another over a latent one."""
    make_tiny_mtp(tmp_path, "deepseek", TARGET)
    rewrite_config(tmp_path, architectures=["GlmMoeDsaForCausalLM"])
    config, _ = load_mtp(tmp_path, TARGET, 1, torch.float32, "cpu")
    assert config.layer.only_layer.latent is not None
    make_tiny_mtp(tmp_path / "other", "deepseek_names", TARGET)
    config, _ = load_mtp(tmp_path / "other", TARGET, 1, torch.float32, "cpu")
    assert config.layer.only_layer.latent is None


def test_refuses_quantized_and_sliding_ones(tmp_path: Path) -> None:
    make_tiny_mtp(tmp_path, "mimo", TARGET)
    rewrite_config(tmp_path, use_sliding_window=True)
    with refused(tmp_path, "use_sliding_window"):
        load(tmp_path)
    rewrite_config(tmp_path, use_sliding_window=False)
    rewrite_tensors(tmp_path, {"model.mtp_layers.0.input_proj.weight": torch.ones(32, 64, dtype=torch.int8)})
    with refused(tmp_path, "quantized", "input_proj.weight is I8"):
        load(tmp_path)


def test_the_config_on_the_hub_may_leave_keys_out(tmp_path: Path) -> None:
    """MiMo-7B's has no layer_types, and rope_theta at the top level. Qwen3.5 turns a quarter of the channels by
    default.
    """
    make_tiny_mtp(tmp_path, "qwen3_5", TARGET, rope_parameters={"rope_type": "default", "rope_theta": 1e7})
    layer = load_mtp(tmp_path, TARGET, 1, torch.float32, "cpu")[0].layer.only_layer
    assert (layer.rope.partial_rotary_factor, layer.rope.theta, layer.attention_gate) == (0.25, 1e7, True)
    (tmp_path / "model.safetensors").unlink()
    make_tiny_mtp(tmp_path, "mimo", TARGET)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["layer_types"], config["rope_parameters"]
    hub = config | {"rope_theta": 640000, "rope_scaling": None, "attention_bias": True, "sliding_window": 32768}
    (tmp_path / "config.json").write_text(json.dumps(hub))
    layer = load_mtp(tmp_path, TARGET, 1, torch.float32, "cpu")[0].layer.only_layer
    assert (layer.rope.theta, layer.qkv_bias, layer.o_bias, layer.qk_norm) == (640000.0, True, False, False)
    assert layer.window is None
