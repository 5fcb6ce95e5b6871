"""Verify's rows of a tree through a whole target: each row's logits are those of its path run alone as a chain."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from spec_lab.attention.torch_tree import TorchTreeAttention
from spec_lab.build.caches import cache_row
from spec_lab.checkpoints.families import read_model_config
from spec_lab.core.kv_cache import NUM_RESERVED_PAGES, PagedKVCache
from spec_lab.core.passes import Pass
from spec_lab.core.types import FeatureSpec
from spec_lab.models.target_loader import WeightSource, load_target
from tests.lossless_cases import TARGETS
from tests.tiny_checkpoints import make_tiny_target

PAGE, NUM_PAGES, DEPTH = 4, 16, 4
PARENTS = [0, 0, 0, 1, 1, 2, 3, 3, 6, 9]  # the last row is its own parent: it holds no draft
LENGTHS = (1, 9, 14)


@pytest.mark.parametrize("name", ["qwen3", "qwen2_sliding"])
@torch.inference_mode()
def test_a_rows_logits_are_those_of_its_path_alone(name: str, tmp_path: Path) -> None:
    """The root's too, behind prompts shorter and longer than a window, which is shorter than the tree is deep; rows
    beside the path hold other tokens.
    """
    window = {"sliding_window": 3} if "sliding_window" in TARGETS[name] else {}
    make_tiny_target(tmp_path, **(TARGETS[name] | window))
    config = read_model_config(tmp_path)
    backend = TorchTreeAttention(PAGE, 64)
    target = load_target(config, WeightSource(tmp_path, torch.float32, torch.device("cpu")), backend, 64)
    rows_of_layers = [cache_row(plan) for plan in config.layers]
    cache = PagedKVCache(rows_of_layers, NUM_PAGES, PAGE, torch.float32, torch.device("cpu"))
    table = torch.tensor([[*range(NUM_RESERVED_PAGES, NUM_PAGES), 1]])
    draw = random.Random(0)
    tokens = [draw.randrange(1, config.vocab_size) for _ in PARENTS]

    def logits(token_ids: list[int], first: int) -> torch.Tensor:
        positions = torch.arange(first, first + len(token_ids)).unsqueeze(0)
        end = first + len(token_ids)
        attention = backend.build(positions, torch.tensor([end]), table, end)
        output = target.forward(torch.tensor(token_ids), Pass(cache, attention), FeatureSpec())
        return target.logits(output.hidden)

    for length in LENGTHS:
        prompt = [draw.randrange(1, config.vocab_size) for _ in range(length)]
        logits(prompt, 0)
        parents = torch.tensor([PARENTS])
        attention = backend.build_tree(parents, DEPTH, torch.tensor([length]), table, length + len(PARENTS))
        output = target.forward(torch.tensor(tokens), Pass(cache, attention), FeatureSpec())
        found = target.logits(output.hidden)
        for row in range(len(PARENTS)):
            path = [row]
            while path[0] != PARENTS[path[0]]:
                path.insert(0, PARENTS[path[0]])
            alone = logits([tokens[other] for other in path], length)[-1]
            torch.testing.assert_close(found[row], alone, rtol=0, atol=1e-4)
        assert (found[1] - found[2]).abs().max() > 1e-2
