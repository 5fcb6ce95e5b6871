"""Scalings of the rotary embedding: targets, GGUF files and heads beside transformers, at twice the original length.

transformers' frequencies follow the sequence that it runs, so here it always runs a sequence of twice the length: what
comes behind a text does not change the text's own logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from spec_lab.checkpoints.families import read_model_config
from spec_lab.core.types import Request
from tests.lab import Reference, generate, make_config, make_engine, random_requests
from tests.scripted_rule import SlowChain, install
from tests.slow_block import SlowBlock
from tests.test_eagle3_drafter import SlowHead
from tests.tiny_blocks import TinyBlock, write_block
from tests.tiny_checkpoints import Family, make_tiny_eagle3, make_tiny_target
from tests.tiny_gguf import WHOLE_BLOCKS, write_gguf

ORIGINAL, LENGTH, HEAD_DIM = 32, 64, 16
DIVISORS = torch.linspace(1.0, 3.0, HEAD_DIM // 2)
THETA = {"rope_theta": 10000.0}
YARN = THETA | {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": ORIGINAL}
LONGROPE = THETA | {
    "rope_type": "longrope",
    "short_factor": (0.5 + DIVISORS / 2).tolist(),
    "long_factor": DIVISORS.square().tolist(),
    "original_max_position_embeddings": ORIGINAL,
}
ROPES: dict[str, dict[str, Any]] = {
    "yarn": YARN,
    "yarn_of_more_keys": YARN | {"beta_fast": 4.0, "beta_slow": 0.5, "attention_factor": 1.4, "truncate": False},
    "dynamic": THETA | {"rope_type": "dynamic", "factor": 2.0},
    "longrope": LONGROPE | {"factor": 2.0},
    "longrope_of_its_lengths": LONGROPE,
}
FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3")


def positions_of(rope: dict[str, Any]) -> int:
    """The `max_position_embeddings` of a file; a file of longrope has the extended one."""
    return LENGTH if rope["rope_type"] == "longrope" else ORIGINAL


def make_target(folder: Path, family: Family, rope: dict[str, Any]) -> Any:
    options = {"num_hidden_layers": 2, "head_dim": HEAD_DIM, **WHOLE_BLOCKS}
    return make_tiny_target(
        folder, family, rope_parameters=dict(rope), max_position_embeddings=positions_of(rope), **options
    )


def long_requests() -> list[Request]:
    return [
        Request(each.request_id, each.category, each.prompt_ids, LENGTH - len(each.prompt_ids) - 4, ignore_eos=True)
        for each in random_requests(3, lengths=(20, 50), seed=3)
    ]


@torch.inference_mode()
def greedy(model: Any, request: Request, length: int) -> list[int]:
    tokens = list(request.prompt_ids)
    for _ in range(request.max_new_tokens):
        filled = torch.tensor([tokens + [5] * (length - len(tokens))])
        tokens.append(int(model(filled, use_cache=False).logits[0, len(tokens) - 1].argmax()))
    return tokens[len(request.prompt_ids) :]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ROPES)
def test_targets_at_twice_the_length(tmp_path: Path, name: str, family: Family) -> None:
    model = make_target(tmp_path, family, ROPES[name])
    requests = long_requests()
    assert read_model_config(tmp_path).max_position_embeddings == LENGTH
    outputs = generate(make_config((tmp_path, tmp_path), "none", batch_size=3), requests)
    assert outputs == {each.request_id: greedy(model, each, LENGTH) for each in requests}


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_a_run_within_the_original_length_has_the_original_frequencies(tmp_path: Path, name: str) -> None:
    """Even if rows behind its longest sequence would not fit into that length."""
    model = make_target(tmp_path, "llama", ROPES[name])
    requests = [Request("r", "x", tuple(range(5, 25)), 12, ignore_eos=True)]
    outputs = generate(make_config((tmp_path, tmp_path), "none"), requests)
    assert outputs["r"] == greedy(model, requests[0], ORIGINAL)
    assert outputs["r"] != greedy(model, requests[0], LENGTH)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["yarn", "longrope"])
def test_gguf_files_at_twice_the_length(tmp_path: Path, kind: str, family: Family) -> None:
    rope = ROPES[kind] | ({} if kind == "yarn" else {"attention_factor": 1.2})
    model = make_target(tmp_path, family, rope)
    scaling = f"{family}.rope.scaling"
    keys: dict[str, Any] = {f"{scaling}.type": kind, f"{scaling}.original_context_length": ORIGINAL}
    tensors: dict[str, np.ndarray | None] = {}
    if kind == "yarn":
        keys |= {f"{scaling}.factor": 2.0, f"{scaling}.yarn_beta_fast": 32.0}
    else:
        keys[f"{scaling}.attn_factor"] = 1.2
        for end in ("long", "short"):
            tensors[f"rope_factors_{end}.weight"] = np.array(rope[f"{end}_factor"], np.float32)
    path = write_gguf(tmp_path / "model.gguf", model, gguf.GGMLQuantizationType.F32, keys=keys, tensors=tensors)
    requests = long_requests()
    outputs = generate(make_config((path, path), "none", batch_size=3), requests)
    assert outputs == {each.request_id: greedy(model, each, LENGTH) for each in requests}


@dataclass
class HeadRotation:
    """transformers' rotation with a head's keys, in a sequence of twice the length."""

    rope: dict[str, Any]

    def __call__(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

        config = LlamaConfig(
            head_dim=HEAD_DIM, max_position_embeddings=positions_of(self.rope), rope_parameters=dict(self.rope)
        )
        tables = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(LENGTH)[None])
        cos, sin = (table[0, positions].unsqueeze(1) for table in tables)
        return heads * cos + rotate_half(heads) * sin


class LongHead(SlowHead):
    def _rotate(self, heads: torch.Tensor) -> torch.Tensor:
        return HeadRotation(self.options["rope_scaling"])(heads, torch.arange(len(heads)))


class LongBlock(SlowBlock):
    def _rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return HeadRotation(self.block.keys["rope_scaling"])(heads, positions)


@pytest.mark.parametrize("drafter", ["eagle3", "dflash"])
@pytest.mark.parametrize("name", ["yarn", "dynamic", "longrope"])
def test_heads_at_twice_the_length(tmp_path: Path, name: str, drafter: str) -> None:
    """The target's own embedding is plain, so only the head's can be wrong."""
    rope, target = ROPES[name], tmp_path / "target"
    make_tiny_target(target, "qwen3", max_position_embeddings=LENGTH)
    keys = {"rope_scaling": rope, "max_position_embeddings": positions_of(rope)}
    of_target, reference = read_model_config(target), Reference(target)
    slow: SlowChain
    if drafter == "eagle3":
        slow = LongHead(make_tiny_eagle3(tmp_path / "head", of_target, **keys), keys, reference)
    else:
        block = TinyBlock(keys=keys)
        slow = LongBlock(write_block(tmp_path / "head", block, of_target), block, reference)
    requests = long_requests()
    config = make_config((target, tmp_path / "head"), drafter, batch_size=3, cache={"page_size": 4})
    engine = make_engine(config, requests)
    rule = install(engine, slow)
    engine.generate(requests)
    assert rule.compared > 20
