"""The shared parts of the recipes of block drafters: the training, the vocabulary, the mask token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spec_lab.checkpoints.taps import Tap
from spec_lab.train.block_config import SlotTrainingConfig
from spec_lab.train.blocks.training import (
    BLOCK_FORM,
)
from spec_lab.train.eagle3_recipe import CountedTexts, most_frequent_tokens
from spec_lab.train.frozen_target import FrozenTarget
from spec_lab.train.head_recipe import PackedForm

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class SlotRecipe(ABC):
    """Trains a block drafter; the subclass makes, saves and loads it."""

    config: SlotTrainingConfig

    @property
    def form(self) -> PackedForm:
        return BLOCK_FORM

    @abstractmethod
    def build(self, target: FrozenTarget, texts: CountedTexts, seed: int, always_drafted: Sequence[int] = ()) -> Any:
        """Make the drafter that training begins with. If a draft vocabulary is chosen for it, that includes the tokens
        that end texts, and `always_drafted`."""

    @abstractmethod
    def taps(self, target: FrozenTarget) -> tuple[Tap, ...]:
        """Return the hidden states that it reads."""

    @abstractmethod
    def save(self, drafter: Any, target: FrozenTarget, folder: Path) -> None:
        """Write it in the layout of its kind: matrices and norms in bf16, vocabulary maps unchanged."""

    @abstractmethod
    def load(self, folder: Path, target: FrozenTarget) -> Any:
        """Read what `save` wrote, its weights held in float32."""

    def mask_token(self, texts: CountedTexts, vocab_size: int) -> int:
        """Return the mask token: the one that is configured, else the one that occurs least in `texts`."""
        if self.config.mask_token_id is not None:
            return self.config.mask_token_id
        return int(texts.count_written_tokens(vocab_size).argmin())

    def vocabulary(self, target: FrozenTarget, texts: CountedTexts, always_drafted: Sequence[int]) -> dict[str, Tensor]:
        """Return the maps of a reduced draft vocabulary; {} if it is the whole vocabulary."""
        if self.config.draft_vocab_size is None:
            return {}
        vocab_size = target.config.vocab_size
        kept = list(dict.fromkeys(always_drafted))
        ids = most_frequent_tokens(texts, vocab_size, self.config.draft_vocab_size, kept)
        is_drafted = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        return {"d2t": ids - torch.arange(len(ids)), "t2d": is_drafted}
