"""Targets and heads with random weights: only config.json is read, and no tokenizer is needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.__main__ import main
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.gemma4_assistant_checkpoint import (
    TOKEN_ORDERING,
    CentroidHeadConfig,
    assistant_tensor_shapes,
    read_assistant_config,
)
from spec_lab.checkpoints.packaged import SHAPES
from spec_lab.checkpoints.random_weights import random_assistant
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from spec_lab.record.reading import read_run
from tests import tiny_gemma4
from tests.covering import each_value
from tests.tiny_checkpoints import make_tiny_target
from tests.tiny_experts import make_tiny_experts
from tests.tiny_hybrid import make_tiny_hybrid
from tests.tiny_latent import make_latent_target

IDS = ["workload=random_ids", "workload.prompt_tokens=12", "workload.num_requests=2"]
CHEAP = [
    "max_new_tokens=6",
    "repeats=1",
    "warmup_requests=0",
    "profile_rounds=0",
    "references=[]",
    "device=cpu",
    "num_threads=1",
]
RANDOM = ["target.weights=random", "drafter.weights=random"]


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    """Make a folder with a config.json and nothing else."""
    make_tiny_target(tmp_path / "whole", "qwen3", num_hidden_layers=7)
    (tmp_path / "shape").mkdir()
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    (tmp_path / "shape" / "config.json").write_text(json.dumps(config))
    return tmp_path / "shape"


def test_any_config_json_runs_with_random_weights(shape: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    target = ["target=hf", f"target.path={shape}", *RANDOM, "drafter.draft_vocab_size=40"]
    assert main([*target, *IDS, *CHEAP, f"output_dir={out}"]) == 0
    [summary] = [read_run(file.parent) for file in out.rglob("summary.json")]
    assert summary.status == "finished"
    assert summary["divergence.bugs"] == 0


def make_shape(kind: str, folder: Path) -> Path:
    """Make a folder with the config.json of a tiny target of `kind`, and nothing else."""
    makers: dict[str, Callable[[Path], Any]] = {
        "window": lambda whole: make_tiny_target(whole, "qwen2", use_sliding_window=True, sliding_window=6),
        "experts": lambda whole: make_tiny_experts(whole, "qwen3_moe"),
        "states": make_tiny_hybrid,
        "latent": make_latent_target,
    }
    makers[kind](folder / "whole")
    (folder / "shape").mkdir()
    (folder / "shape" / "config.json").write_bytes((folder / "whole" / "config.json").read_bytes())
    return folder / "shape"


@pytest.mark.parametrize(
    ("kind", "drafter"),
    each_value(["window", "experts", "states", "latent"], ["mtp_eagle", "mtp_vanilla"]),
)
def test_any_target_gets_random_mtp_modules(drafter: str, kind: str, tmp_path: Path) -> None:
    """They are of its own last layer with attention, and change no token of it."""
    target = ["target=hf", f"target.path={make_shape(kind, tmp_path)}", f"drafter={drafter}", *RANDOM]
    assert main([*target, *IDS, *CHEAP, "prune=catchup", f"output_dir={tmp_path / 'out'}"]) == 0
    [summary] = [read_run(file.parent) for file in (tmp_path / "out").rglob("summary.json")]
    assert summary["divergence.bugs"] == 0


ASSISTANT = {
    "architectures": ["Gemma4AssistantForCausalLM"],
    "backbone_hidden_size": 32,
    "use_ordered_embeddings": True,
    "num_centroids": 16,
    "centroid_intermediate_top_k": 3,
    "text_config": tiny_gemma4.TEXT
    | {
        "model_type": "gemma4_text",
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "layer_types": tiny_gemma4.KINDS["e4b"]["layer_types"][:3],
    },
}


def test_an_assistant_of_random_weights_has_the_sizes_of_a_config_json(tmp_path: Path) -> None:
    """It drafts from its target's keys, and changes no token of it; nothing but config.json lies in its folder."""
    target = tiny_gemma4.TEXT | tiny_gemma4.KINDS["e4b"] | {"model_type": "gemma4_text"}
    for name, config in (("target", target), ("assistant", ASSISTANT)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    paths = [f"target.path={tmp_path / 'target'}", f"drafter.path={tmp_path / 'assistant'}"]
    out = f"output_dir={tmp_path / 'out'}"
    assert main(["target=hf", "drafter=frozen_kv", *paths, *RANDOM, *IDS, *CHEAP, "graph=full_loop", out]) == 0
    [summary] = [read_run(file.parent) for file in (tmp_path / "out").rglob("summary.json")]
    assert summary["divergence.bugs"] == 0


@pytest.mark.parametrize(
    ("name", "millions", "sources"), [("gemma4_31b", 469.5, (58, 59)), ("gemma4_e4b", 78.5, (22, 23))]
)
def test_the_assistant_of_a_shape_has_the_released_sizes(name: str, millions: float, sources: tuple[int, int]) -> None:
    target = read_model_config(SHAPES / name)
    config = read_assistant_config(SHAPES / f"{name}_assistant", target)
    assert sum(map(prod, assistant_tensor_shapes(config).values())) / 1e6 == pytest.approx(millions, abs=0.1)
    assert config.kv_sources == (*[sources[0]] * 3, sources[1])


def test_random_clusters_name_every_token_once() -> None:
    target = replace(read_model_config(SHAPES / "gemma4_e4b"), vocab_size=12)
    config = replace(
        read_assistant_config(SHAPES / "gemma4_e4b_assistant", read_model_config(SHAPES / "gemma4_e4b")),
        target=target,
        centroids=CentroidHeadConfig(3, 2),
    )
    tensors = random_assistant(config, torch.float32, torch.device("cpu"), 0)
    assert tensors[TOKEN_ORDERING].tolist() == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]


def test_a_checkpoint_without_a_tokenizer_runs_on_ids(tmp_path: Path) -> None:
    """One whose tokenizer needs code of its own has no tokenizer.json either."""
    make_tiny_target(tmp_path / "model", "qwen3", num_hidden_layers=2)
    target = ["target=hf", f"target.path={tmp_path / 'model'}", "drafter=ngram", f"output_dir={tmp_path / 'out'}"]
    assert main([*target, *IDS, *CHEAP]) == 0


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        *(("llama3_8b", 8.03), ("llama3_70b", 70.55), ("qwen3_4b", 4.02), ("qwen3_8b", 8.19), ("qwen3_30b_a3b", 30.53)),
        ("glm4_7_flash", 29.94),
    ],
)
def test_a_shape_has_the_parameters_of_its_model(name: str, billions: float) -> None:
    """They are as many as the model's card counts."""
    shapes = decoder_tensor_shapes(read_model_config(SHAPES / name))
    total = 0
    for shape in shapes.values():
        size = 1
        for extent in shape:
            size *= extent
        total += size
    assert total / 1e9 == pytest.approx(billions, abs=0.01)
