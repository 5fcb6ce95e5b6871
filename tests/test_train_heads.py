"""A head for any target: what trains and what serves it compute the same, for tiny targets of several families."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spec_lab.train.drafter_config import Eagle3TrainingConfig
from spec_lab.train.eagle3_recipe import Eagle3Recipe
from spec_lab.train.frozen_target import FrozenTarget
from spec_lab.train.proof import prove
from spec_lab.train.serving import Serving
from tests.tiny_checkpoints import make_tiny_target

CPU = torch.device("cpu")
NUM_DRAFT_TOKENS = 4


@dataclass(frozen=True)
class WrittenTokens:
    """Texts that say how often each token stands in them."""

    tokens: Tensor

    def __len__(self) -> int:
        return 1

    def count_written_tokens(self, vocab_size: int) -> Tensor:
        return torch.bincount(self.tokens, minlength=vocab_size)


def texts(vocab_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, vocab_size, (length,), generator=generator) for length in (13, 17)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_an_eagle3_head_is_served_as_it_is_trained(family: str, tmp_path: Path) -> None:
    make_tiny_target(tmp_path / "target", family)
    target = FrozenTarget.load(tmp_path / "target", CPU, torch.float32, 64)
    recipe = Eagle3Recipe(Eagle3TrainingConfig(draft_vocab_size=40, intermediate_size=24, head_dim=8))
    head = recipe.build(target, WrittenTokens(torch.cat(texts(160))), seed=0)
    recipe.save(head, target, tmp_path / "head")
    loaded = recipe.load(tmp_path / "head", target)
    serving = Serving.load(tmp_path / "target", CPU, "float32", NUM_DRAFT_TOKENS, 1, 64)
    proof = prove(loaded, "eagle3", target, serving, tmp_path / "head", texts(160), recipe.taps(target))
    proof.require()
    assert proof.largest_logit > 0.1
