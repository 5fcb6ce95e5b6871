"""EAGLE-3 heads in the layouts found on the hub, and heads that must be refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.eagle3_checkpoint import default_tap_layer_inputs, load_eagle3, read_eagle3_config
from spec_lab.checkpoints.families import read_decoder
from spec_lab.checkpoints.plan import RopeConfig
from tests.tiny_checkpoints import TINY_SIZES, make_tiny_eagle3, refused, rewrite_config, rewrite_tensors

TARGET = read_decoder(TINY_SIZES | {"model_type": "qwen3", "head_dim": 16}, "target")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def load(folder: Path, target: ModelConfig = TARGET) -> dict[str, torch.Tensor]:
    return load_eagle3(folder, target, torch.float32, "cpu")[1]


def assert_same(loaded: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(loaded) == set(expected)
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("embed_tokens", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("layout", ["safeailab", "speculators"])
def test_both_layouts_give_the_same_tensors(tmp_path: Path, layout: Any, family: Any, embed_tokens: bool) -> None:
    expected = make_tiny_eagle3(
        tmp_path, TARGET, layout, family=family, embed_tokens=embed_tokens, norm_before_residual=embed_tokens
    )
    config, tensors = load_eagle3(tmp_path, TARGET, torch.float32, "cpu")
    assert_same(tensors, expected)
    assert config.layer.family == family
    assert config.layer.only_layer.qk_norm == (family == "qwen3")
    assert config.layer.num_layers == 1
    assert config.layer.only_layer.rope == RopeConfig(theta=10000.0, scaling="none")
    assert (config.target_hidden_size, config.draft_vocab_size, config.target_vocab_size) == (32, 120, 160)
    assert config.norm_before_residual == embed_tokens
    assert config.tap_layer_inputs == (2, 4, 5)


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.replace("midlayer.", "layers.0."),
        lambda name: f"model.{name}",
        lambda name: (
            name if name in ("d2t", "t2d", "lm_head.weight") else f"model.{name.replace('midlayer', 'layers.0')}"
        ),
    ],
)
def test_other_prefixes_of_the_same_tensors(tmp_path: Path, rename: Callable[[str], str]) -> None:
    expected = make_tiny_eagle3(tmp_path, TARGET)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({rename(name): tensor.clone() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    assert_same(load(tmp_path), expected)


def test_weights_are_cast_and_maps_are_not(tmp_path: Path) -> None:
    expected = make_tiny_eagle3(tmp_path, TARGET)
    rewrite_tensors(tmp_path, {"d2t": expected["d2t"].to(torch.int32), "t2d": expected["t2d"].to(torch.uint8)})
    _, tensors = load_eagle3(tmp_path, TARGET, torch.bfloat16, "cpu")
    assert_same(tensors, {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in expected.items()})


def test_positions_reach_as_far_as_the_targets(tmp_path: Path) -> None:
    make_tiny_eagle3(tmp_path, TARGET)
    assert read_eagle3_config(tmp_path, TARGET).layer.max_position_embeddings == 512
    shorter = replace(TARGET, max_position_embeddings=32)
    assert read_eagle3_config(tmp_path, shorter).layer.max_position_embeddings == 64


def test_head_of_the_whole_vocabulary_needs_neither_maps_nor_lm_head(tmp_path: Path) -> None:
    expected = make_tiny_eagle3(tmp_path, TARGET, draft_vocab_size=160)
    assert "d2t" not in expected
    assert_same(load(tmp_path), expected)
    rewrite_config(tmp_path, drop=("draft_vocab_size",))
    rewrite_tensors(tmp_path, {}, drop=("lm_head.weight",))
    config, tensors = load_eagle3(tmp_path, TARGET, torch.float32, "cpu")
    assert config.draft_vocab_size == 160
    assert set(expected) - set(tensors) == {"lm_head.weight"}


def test_d2t_without_t2d(tmp_path: Path) -> None:
    expected = make_tiny_eagle3(tmp_path, TARGET)
    rewrite_tensors(tmp_path, {}, drop=("t2d",))
    del expected["t2d"]
    assert_same(load(tmp_path), expected)


def test_tap_layers_of_each_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The outputs of layers 1, 3, 4 are the inputs of layers 2, 4, 5."""
    caplog.set_level(logging.INFO)
    make_tiny_eagle3(tmp_path, TARGET, eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    assert read_eagle3_config(tmp_path, TARGET).tap_layer_inputs == (2, 4, 5)
    rewrite_config(tmp_path, eagle_config={LAYER_IDS: [1, 3, 4], "use_aux_hidden_state": True})
    assert read_eagle3_config(tmp_path, TARGET).tap_layer_inputs == (2, 4, 5)
    rewrite_config(tmp_path, drop=(LAYER_IDS,))
    assert read_eagle3_config(tmp_path, TARGET).tap_layer_inputs == (2, 4, 5)
    assert not caplog.records


def test_default_taps() -> None:
    assert default_tap_layer_inputs(8) == (2, 4, 5)
    assert default_tap_layer_inputs(32) == (2, 16, 29)
    with refused("6 layers", "drafter=ngram"):
        default_tap_layer_inputs(6)


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"hidden_size": 64}, ("hidden_size is 64, the target has 32",)),
        ({"target_hidden_size": 48}, ("hidden_size is 48, the target has 32",)),
        ({"vocab_size": 200}, ("vocab_size is 200, the target has 160",)),
        ({"vocab_size": 200, "hidden_size": 64}, ("is 64, the target has 32; vocab_size is 200",)),
        ({"speculators_model_type": "eagle", "transformer_layer_config": {}}, ("speculators_model_type 'eagle'",)),
        ({"eagle_config": {"use_aux_hidden_state": False}}, ("use_aux_hidden_state",)),
        ({"num_hidden_layers": 2}, ("num_hidden_layers 2",)),
        ({"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0}, ("use_sliding_window",)),
    ],
)
def test_refuses_heads_of_another_kind_or_target(
    tmp_path: Path, changes: dict[str, Any], fragments: tuple[str, ...]
) -> None:
    make_tiny_eagle3(tmp_path, TARGET, **changes)
    with refused(tmp_path / "config.json", *fragments):
        load(tmp_path)


def test_a_head_without_the_key_has_its_norm_after_the_residual(tmp_path: Path) -> None:
    make_tiny_eagle3(tmp_path, TARGET, norm_before_residual=True)
    rewrite_config(tmp_path, drop=("norm_before_residual",))
    assert read_eagle3_config(tmp_path, TARGET).norm_before_residual is False


EAGLE31_NORMS = {
    "norm_before_fc": {"input_norm.weight": (96,)},
    "fc_norm": {f"fc_norm.{tap}.weight": (32,) for tap in range(3)},
    "norm_output": {},
}


@pytest.mark.parametrize("place", ["top level", "eagle_config"])
@pytest.mark.parametrize("layout", ["safeailab", "speculators"])
@pytest.mark.parametrize("option", EAGLE31_NORMS)
def test_eagle31_options_and_their_norms(tmp_path: Path, option: str, layout: Any, place: str) -> None:
    """NVIDIA's heads keep these options under `eagle_config`."""
    expected = make_tiny_eagle3(tmp_path, TARGET, layout, **{option: True})
    if place == "eagle_config":
        rewrite_config(tmp_path, eagle_config={option: True}, **{option: None})
    config, tensors = load_eagle3(tmp_path, TARGET, torch.float32, "cpu")
    assert_same(tensors, expected)
    found = {
        name: tuple(tensor.shape) for name, tensor in tensors.items() if name.startswith(("input_norm", "fc_norm"))
    }
    assert found == EAGLE31_NORMS[option]
    assert [name for name in EAGLE31_NORMS if getattr(config, name)] == [option]


def test_the_top_level_stands_over_eagle_config(tmp_path: Path) -> None:
    make_tiny_eagle3(tmp_path, TARGET, norm_output=False, eagle_config={"norm_output": True})
    assert read_eagle3_config(tmp_path, TARGET).norm_output is False


def test_a_narrower_head_needs_its_own_embedding(tmp_path: Path) -> None:
    make_tiny_eagle3(tmp_path, TARGET, target_hidden_size=48)
    wider = replace(TARGET, hidden_size=48)
    rewrite_tensors(tmp_path, {"fc.weight": torch.zeros(32, 3 * 48)})
    rewrite_tensors(tmp_path, {"embed_tokens.weight": torch.ones(160, 32)})
    assert load(tmp_path, wider)["embed_tokens.weight"].shape == (160, 32)


def test_refuses_broken_vocabulary_maps(tmp_path: Path) -> None:
    expected = make_tiny_eagle3(tmp_path, TARGET)
    d2t, t2d = expected["d2t"], expected["t2d"]
    last = torch.arange(120) == 119
    for changes, fragment in (
        ({"d2t": d2t.masked_fill(last, 41)}, "d2t names a token outside"),
        ({"d2t": d2t.masked_fill(last, -120)}, "d2t names a token outside"),
        ({"d2t": d2t.masked_fill(last, int(d2t[0]) - 119)}, "one target id to two draft ids"),
        ({"d2t": d2t, "t2d": t2d[:-1]}, "d2t and t2d name different target ids"),
        ({"t2d": ~t2d}, "d2t and t2d name different target ids"),
        ({"t2d": torch.ones(160, dtype=torch.bool)}, "d2t and t2d name different target ids"),
    ):
        rewrite_tensors(tmp_path, {"d2t": d2t, "t2d": t2d} | changes)
        with refused(tmp_path, fragment):
            load(tmp_path)
    rewrite_tensors(tmp_path, {"d2t": torch.zeros_like(d2t)}, drop=("t2d",))
    with refused(tmp_path, "d2t is all zeros"):
        load(tmp_path)
    rewrite_tensors(tmp_path, {}, drop=("d2t",))
    with refused(tmp_path, "d2t is missing", "120", "160"):
        load(tmp_path)
