"""Targets with layers of experts against transformers: Qwen3-MoE and GLM-4.5, whole, in chunks and row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spec_lab.checkpoints.checkpoint import read_tensors, stored_tensors
from tests.covering import each_value
from tests.lab import Reference, generate, make_config, random_requests
from tests.target_lane import assert_logits, made_once
from tests.tiny_checkpoints import rewrite_tensors, use_hub_spelling
from tests.tiny_experts import KINDS, make_tiny_experts

LENGTH = 100
PARTS = {"whole": [LENGTH], "chunks": [40, 1, 4, 55], "rows_of_4": [4] * 25}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder and the transformers model of each kind, made once."""
    return made_once(tmp_path_factory, make_tiny_experts)


@pytest.mark.parametrize(("kind", "parts"), each_value(KINDS, PARTS, times=2))
def test_logits_equal_transformers(checkpoints: Any, kind: str, parts: str) -> None:
    assert_logits(*checkpoints(kind), PARTS[parts])


def test_the_spelling_of_the_hub_and_experts_in_one_tensor(checkpoints: Any, tmp_path: Path) -> None:
    """The file that transformers writes has a tensor an expert; those of some families have one a layer."""
    folder, model = checkpoints("glm4_moe_biases_and_norms")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    stored = stored_tensors(folder)
    fused = read_tensors({name: stored[name] for name in stored if ".mlp.experts." in name}, torch.float32, "cpu")
    separate = [name for name in load_file(folder / "model.safetensors") if ".mlp.experts." in name]
    assert len(fused) == 6 and len(separate) == 3 * 8 * 3
    rewrite_tensors(tmp_path, fused, drop=tuple(separate))
    use_hub_spelling(tmp_path)  # which leaves out that half of a head turns: GLM's default
    assert "partial_rotary_factor" not in (tmp_path / "config.json").read_text()
    assert_logits(tmp_path, model, [LENGTH])


@pytest.mark.parametrize("kind", ["glm4_moe_biases_and_norms", "qwen3_moe"])
def test_greedy_text_is_transformers_whatever_is_drafted(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "target"
    make_tiny_experts(target, kind)
    reference, requests = Reference(target), random_requests(4, max_new_tokens=10)
    plain = {request.request_id: reference.greedy(request) for request in requests}
    for drafter, batch_size in (("none", 1), ("none", 3), ("ngram", 3)):
        outputs = generate(make_config((target, target), drafter, batch_size=batch_size), requests)
        reference.assert_lossless(requests, outputs, plain)
