"""Gemma 4 targets and their assistants through the fused kernels, against the same models without, in 16 bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_kernels.rope_write import rope_write
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.gemma4_assistant_checkpoint import (
    TOKEN_ORDERING,
    assistant_tensor_shapes,
    read_assistant_config,
)
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from spec_lab.core.kept import Drop, Kept
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet
from spec_lab.core.passes import Pass
from spec_lab.core.types import FeatureSpec
from spec_lab.models.gemma4 import Gemma4Target
from spec_lab.models.gemma4_assistant import Gemma4Assistant
from spec_lab.operators.triton_set import triton_set
from tests.kernel_lab import DEVICE, randn
from tests.test_triton_products import DTYPE, MAX_POSITIONS, Lane, assert_alike, assert_rounds_are_plain, prompt
from tests.tiny_checkpoints import random_weight
from tests.tiny_gemma4 import FULL, KINDS, SLIDING, TEXT, VOCAB

ASSISTANT: dict[str, Any] = {
    "architectures": ["Gemma4AssistantForCausalLM"],
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": TEXT["hidden_size"],
    "use_ordered_embeddings": False,
    "text_config": {
        key: TEXT[key]
        for key in ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "global_head_dim")
    }
    | {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_kv_shared_layers": 3}
    | {"layer_types": [SLIDING, SLIDING, FULL], "sliding_window": TEXT["sliding_window"], "model_type": "gemma4_text"}
    | {"hidden_size_per_layer_input": 0, "max_position_embeddings": 256, "hidden_activation": "gelu_pytorch_tanh"},
}


def weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Random ones, in which norms and scalars are not 1."""
    generator = torch.Generator().manual_seed(4)
    return {name: random_weight(name, shape, generator).to(DEVICE, DTYPE) for name, shape in shapes.items()}


def read_target(folder: Path, kind: str) -> ModelConfig:
    """A model of a kind with few layers, of which one of each type reads another's KV where any does."""
    folder.mkdir(exist_ok=True)
    num_shared = 2 if KINDS[kind].get("num_kv_shared_layers") else 0
    layer_types = [SLIDING, FULL, *[SLIDING, FULL][:num_shared]]
    layers = {"num_hidden_layers": len(layer_types), "layer_types": layer_types, "num_kv_shared_layers": num_shared}
    text = TEXT | KINDS[kind] | layers | {"model_type": "gemma4_text"}
    (folder / "config.json").write_text(json.dumps(text))
    return read_model_config(folder)


def make_target(config: ModelConfig, lane: Lane, kernels: KernelSet) -> Gemma4Target:
    tensors = weights(decoder_tensor_shapes(config))
    return Gemma4Target(config, tensors, lane.backend, MAX_POSITIONS, kernels=kernels)


def caches(lane: Lane) -> list[torch.Tensor]:
    return list(lane.cache.tensors)


NO_HALF = pytest.mark.skipif(DEVICE.type == "cuda", reason="torch has no experts in float16 there")


@pytest.mark.parametrize(("kind", "num_rows"), [pytest.param("26b", 2, marks=NO_HALF), ("e4b", 10), ("31b", 33)])
def test_a_target_gives_what_it_gives_without(tmp_path: Path, kind: str, num_rows: int) -> None:
    """Prompt rows first, of which the last layers take the last alone, then rows of two requests: few, which have
    products of ours with norms inside, and more, which have the library's with kernels between them."""
    config, outcomes = read_target(tmp_path, kind), []
    not_invariant = [triton_set(row_invariant=False)] if num_rows == 10 else []
    for kernels in (TORCH_FORMS, triton_set(), *not_invariant):
        lane = Lane.of(config.layers)
        target, last = make_target(config, lane, kernels), torch.tensor([5, 11], device=DEVICE)
        for tensor in caches(lane):
            tensor.zero_()
        kept = Kept(Drop.AFTER_ATTENTION, last, lane.metadata([5, 5], 1))
        begin = Pass(lane.cache, lane.metadata([0, 0], 6), kept)
        first = target.forward(prompt(2, 6).flatten(), begin, FeatureSpec())
        rows = prompt(2, num_rows).flatten()
        round_ = target.forward(rows, Pass(lane.cache, lane.metadata([6, 4], num_rows)), FeatureSpec())
        outcomes.append([first.hidden, target.logits(round_.hidden), *caches(lane)])
    for outcome in outcomes[1:]:
        for got, expected in zip(outcome, outcomes[0], strict=True):
            assert_alike(got, expected)


@pytest.mark.parametrize("kind", ["31b", "e2b"])
def test_heads_through_the_kernel_are_those_of_torch(tmp_path: Path, kind: str) -> None:
    config, outcomes = read_target(tmp_path, kind), []
    for kernel in (None, rope_write):
        lane = Lane.of(config.layers)
        lane.backend.rope_write = kernel
        target = make_target(config, lane, TORCH_FORMS)
        for tensor in caches(lane):
            tensor.zero_()
        begin = prompt(2, 6).flatten(), Pass(lane.cache, lane.metadata([0, 0], 6)), FeatureSpec()
        outcomes.append([target.forward(*begin).hidden, *caches(lane)])
    for got, expected in zip(*outcomes, strict=True):
        assert_alike(got, expected)


def test_a_row_of_a_round_is_the_row_of_plain_decoding(tmp_path: Path) -> None:
    config = read_target(tmp_path, "e4b")
    assert all(triton_set().is_row_invariant(plan) for plan in config.layers)
    lane = Lane.of(config.layers)
    assert_rounds_are_plain(lane, make_target(config, lane, triton_set()))


def make_assistant(
    folder: Path, config: ModelConfig, centroids: bool, lane: Lane, kernels: KernelSet
) -> Gemma4Assistant:
    of_head = (
        {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 2} if centroids else {}
    )
    (folder / "config.json").write_text(json.dumps(ASSISTANT | of_head))
    assistant = read_assistant_config(folder, config)
    tensors = weights(assistant_tensor_shapes(assistant))
    if centroids:
        tensors[TOKEN_ORDERING] = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    embedding = randn(VOCAB, config.hidden_size, seed=3, dtype=DTYPE)
    return Gemma4Assistant(assistant, tensors, embedding, lane.backend, MAX_POSITIONS, kernels=kernels)


@pytest.mark.parametrize("centroids", [True, False])
def test_an_assistant_gives_what_it_gives_without(tmp_path: Path, centroids: bool) -> None:
    config, outcomes = read_target(tmp_path / "target", "e4b"), []
    for kernels in (TORCH_FORMS, triton_set()):
        lane = Lane.of(config.layers)
        lane.backend.rope_write = None if kernels is TORCH_FORMS else rope_write
        for seed, tensor in enumerate(caches(lane)):
            tensor.copy_(randn(*tensor.shape, seed=seed, dtype=DTYPE))
        head = make_assistant(tmp_path, config, centroids, lane, kernels)
        read = [lane.cache.layers[source] for source in head.config.kv_sources]
        given = prompt(1, 2).flatten(), randn(2, config.hidden_size, seed=5, dtype=DTYPE)
        out = head.forward(*given, read, lane.metadata([6, 4], 1))
        outcomes.append([out, head.project(out), head.target_logits(out).nan_to_num(neginf=0.0), head.greedy(out)])
    for got, expected in zip(*outcomes, strict=True):
        assert_alike(got, expected)
