"""Reading Gemma 4 assistants: whose keys and values each layer reads, and everything that is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.gemma4_assistant_checkpoint import AssistantConfig, load_assistant, read_assistant_config
from spec_lab.checkpoints.plan import RopeConfig
from tests.tiny_assistant import FULL, SLIDING, make_tiny_assistant
from tests.tiny_checkpoints import make_tiny_target, refused, rewrite_config, rewrite_tensors
from tests.tiny_gemma4 import rewrite_text

TWO_TYPES = (SLIDING, FULL)
CENTROIDS = {"use_ordered_embeddings": True, "num_centroids": 16, "centroid_intermediate_top_k": 3}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("qwen3", "sliding")}
    make_tiny_target(folders["qwen3"], "qwen3")
    options = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 5}
    make_tiny_target(folders["sliding"], "qwen3", **options)
    return folders


@pytest.fixture(scope="module")
def target(targets: dict[str, Path]) -> ModelConfig:
    return read_model_config(targets["qwen3"])


@pytest.fixture(scope="module")
def sliding_target(targets: dict[str, Path]) -> ModelConfig:
    return read_model_config(targets["sliding"])


def read(folder: Path, target: ModelConfig) -> AssistantConfig:
    return read_assistant_config(folder, target)


def load(folder: Path, target: ModelConfig) -> dict[str, torch.Tensor]:
    return load_assistant(folder, target, torch.float32, "cpu")[1]


def sources(config: AssistantConfig) -> list[int]:
    return list(config.kv_sources)


def changed(target: ModelConfig, changes: dict[int, dict[str, Any]]) -> ModelConfig:
    """The target with other plans of some layers."""
    plans = enumerate(target.layers)
    return replace(target, layers=tuple(replace(plan, **changes.get(index, {})) for index, plan in plans))


def test_loads_what_was_saved(tmp_path: Path, target: ModelConfig) -> None:
    expected = make_tiny_assistant(tmp_path, target, **CENTROIDS)
    tensors = load(tmp_path, target)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    _, cast = load_assistant(tmp_path, target, torch.bfloat16, "cpu")
    assert cast["masked_embedding.token_ordering"].dtype == torch.int64
    assert cast["pre_projection.weight"].dtype == torch.bfloat16


def test_a_layer_reads_the_last_target_layer_of_its_type(tmp_path: Path, sliding_target: ModelConfig) -> None:
    """The tiny target slides from layer 5 on."""
    make_tiny_assistant(tmp_path, sliding_target, layer_types=(SLIDING, SLIDING, FULL))
    config = read(tmp_path, sliding_target)
    assert sources(config) == [7, 7, 4]
    assert [layer.window for layer in config.body.layers] == [5, 5, None]


def test_layers_that_own_no_kv_are_not_read(tmp_path: Path, target: ModelConfig) -> None:
    described = changed(target, {index: {"kv_owner": 4} for index in (5, 6, 7)})
    make_tiny_assistant(tmp_path, target)
    assert sources(read_assistant_config(tmp_path, described)) == [4, 4]
    rewrite_config(tmp_path, kv_source_layers=[4, 5])
    with refused("kv_source_layers 5 is not supported"):
        read_assistant_config(tmp_path, described)


def test_kv_source_layers_stand_over_the_rule(tmp_path: Path, target: ModelConfig) -> None:
    make_tiny_assistant(tmp_path, target, kv_source_layers=[6, 0])
    assert sources(read(tmp_path, target)) == [6, 0]


def test_both_spellings_of_two_head_sizes(tmp_path: Path, target: ModelConfig) -> None:
    described = changed(target, {6: {"window": 5}, 7: {"num_kv_heads": 1, "head_dim": 32}})
    hub = {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    make_tiny_assistant(tmp_path, target, layer_types=TWO_TYPES, text=hub)
    from_hub = read_assistant_config(tmp_path, described)
    rewrite_text(
        tmp_path,
        drop=("global_head_dim", "num_global_key_value_heads"),
        per_layer_config={"1": {"head_dim": 32, "num_key_value_heads": 1}},
    )
    assert read_assistant_config(tmp_path, described) == from_hub
    assert [layer.head_dim for layer in from_hub.body.layers] == [16, 32]


def test_ropes_of_gemma_where_the_file_names_none(tmp_path: Path, target: ModelConfig) -> None:
    ropes = [RopeConfig(10_000.0, "none"), RopeConfig(1e6, "proportional", partial_rotary_factor=0.25)]
    described = changed(target, {6: {"window": 5, "rope": ropes[0]}, 7: {"rope": ropes[1]}})
    make_tiny_assistant(tmp_path, target, layer_types=TWO_TYPES)
    rewrite_text(tmp_path, drop=("rope_parameters",))
    config = read_assistant_config(tmp_path, described)
    assert [layer.rope for layer in config.body.layers] == ropes


@pytest.mark.parametrize(
    ("outer", "text", "fragments"),
    [
        ({"model_type": "llama"}, {}, ["model_type 'llama'", "gemma4_assistant"]),
        ({"backbone_hidden_size": 48}, {}, ["another target", "hidden_size is 48, the target has 32"]),
        ({}, {"vocab_size": 100}, ["another target", "vocab_size is 100, the target has 160"]),
        ({}, {"global_head_dim": 32}, ["layer 0", "head_dim is 32, the target has 16"]),
        ({}, {"num_key_value_heads": 4}, ["layer 0", "num_kv_heads is 4, the target has 2"]),
        ({}, {"rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 500.0}}}, ["layer 0", "rope is"]),
        (
            {},
            {"rope_parameters": {FULL: {"rope_theta": 1e4, "rope_type": "proportional", "partial_rotary_factor": 0.5}}},
            ["layer 0", "rope is", "partial_rotary_factor=0.5"],
        ),
        ({}, {"layer_types": [SLIDING, FULL]}, ["a sliding layer"]),
    ],
)
def test_refuses_other_assistants(
    tmp_path: Path, target: ModelConfig, outer: dict[str, Any], text: dict[str, Any], fragments: list[str]
) -> None:
    make_tiny_assistant(tmp_path, target)
    rewrite_config(tmp_path, **outer)
    rewrite_text(tmp_path, **text)
    with refused(tmp_path / "config.json", *fragments):
        read(tmp_path, target)


def test_refuses_tensors_that_do_not_fit(tmp_path: Path, target: ModelConfig) -> None:
    make_tiny_assistant(tmp_path, target, **CENTROIDS)
    ordering = "masked_embedding.token_ordering"
    repeated = torch.arange(160).clamp(max=158)
    rewrite_tensors(tmp_path, {ordering: repeated})
    with refused(tmp_path, ordering, "160 tokens once"):
        load(tmp_path, target)
    rewrite_tensors(tmp_path, {}, drop=(ordering,))
    with refused(tmp_path, ordering, "160 tokens once"):
        load(tmp_path, target)
