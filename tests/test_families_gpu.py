"""Targets whose layers differ, on a GPU with kernels and captured, against themselves on the CPU in torch.

The checkpoints are made of shapes alone, so that no version of transformers has to know the families.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from spec_lab.config.choices import KernelsChoice, Rollback
from spec_lab.config.run import RecurrentConfig, Run
from tests import tiny_gemma4, tiny_hybrid
from tests.graph_lab import MODES
from tests.lab import generate, make_config, part, random_requests
from tests.tiny_checkpoints import random_weight

TARGETS: dict[str, dict[str, Any]] = {
    **{
        kind: tiny_gemma4.TEXT | options | {"model_type": "gemma4_text", "vocab_size": 64}
        for kind, options in tiny_gemma4.KINDS.items()
    },
    "qwen3_5": tiny_hybrid.SIZES | {"model_type": "qwen3_5_text"},
    "qwen3_5_moe": tiny_hybrid.SIZES | tiny_hybrid.EXPERTS | {"model_type": "qwen3_5_moe_text"},
}


def make_target(folder: Path, kind: str) -> None:
    """Write a checkpoint of random float32 weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TARGETS[kind] | {"vocab_size_per_layer_input": 64}))
    config = read_model_config(folder)
    shapes = decoder_tensor_shapes(config)
    generator = torch.Generator().manual_seed(0)
    save_file(
        {name: random_weight(name, shape, generator) for name, shape in shapes.items()},
        folder / "model.safetensors",
    )


def config_of(folder: Path, device: str, rollback: Rollback = Rollback.checkpoints) -> Run:
    return make_config(
        (folder, folder),
        "random",
        3,
        "prefill",
        batch_size=2,
        device=device,
        dtype="float32",
        cache={"page_size": 4, "prefill_chunk": 7},
        recurrent=RecurrentConfig(rollback),
    )


def assert_equal_on(
    device: str, kernels: KernelsChoice, folder: Path, kind: str, rollback: Rollback, mode: str
) -> None:
    make_target(folder, kind)
    requests = random_requests(3, 20, vocab_size=64, lengths=(1, 17))
    expected = generate(config_of(folder, "cpu"), requests)
    config = replace(config_of(folder, device, rollback), kernels=kernels, attention=part("attention", kernels))
    found = generate(config if mode == "eager" else replace(config, graph=MODES[mode]), requests)
    assert found == expected and all(expected.values())


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "round"])
@pytest.mark.parametrize("kernels", [KernelsChoice.torch, KernelsChoice.triton])
@pytest.mark.parametrize(
    ("kind", "rollback"), [*((kind, Rollback.checkpoints) for kind in TARGETS), ("qwen3_5", Rollback.replay)]
)
def test_a_target_on_a_gpu_gives_the_text_of_the_cpu(
    tmp_path: Path, kind: str, rollback: Rollback, kernels: KernelsChoice, mode: str
) -> None:
    if kind in ("26b", "qwen3_5_moe") and kernels == KernelsChoice.torch:
        pytest.skip("layers of experts run in bfloat16 alone with kernels=torch")
    assert_equal_on("cuda", kernels, tmp_path, kind, rollback, mode)
