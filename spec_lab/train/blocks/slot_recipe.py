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
from spec_lab.train.block_config import SlotTrainingConfig, StoredAs
from spec_lab.train.blocks.training import (
    BLOCK_FORM,
    GENERATED_ROW_LENGTH,
    block_matcher,
    packed_generations,
    train_blocks,
)
from spec_lab.train.drafter import DraftMatcher, TrainingTask
from spec_lab.train.eagle3_recipe import CountedTexts, most_frequent_tokens
from spec_lab.train.frozen_target import FrozenTarget
from spec_lab.train.generations import Generations
from spec_lab.train.head_recipe import PackedForm
from spec_lab.train.loop import CurvePoint
from spec_lab.train.narrow import store_in_fp8
from spec_lab.train.packed_training import PackedTask

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


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
    def write(self, drafter: Any, target: FrozenTarget, folder: Path) -> None:
        """Write it in the layout of its kind: matrices and norms in bf16, vocabulary maps unchanged."""

    @abstractmethod
    def load(self, folder: Path, target: FrozenTarget) -> Any:
        """Read what `save` wrote, its weights held in float32."""

    def save(self, drafter: Any, target: FrozenTarget, folder: Path) -> None:
        """Write it as `write` does. With drafter.stored_as=fp8, then store its large matrices in e4m3."""
        self.write(drafter, target, folder)
        if self.config.stored_as == StoredAs.fp8:
            store_in_fp8(folder)

    def train(self, task: TrainingTask, folder: Path) -> list[CurvePoint]:
        """Train the drafter and save it, as `DrafterRecipe` says."""
        device, texts = task.device, task.generations
        assert isinstance(texts, Generations), "block drafters learn on texts that the target wrote"
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        target = FrozenTarget.load(Path(task.model.name_or_path), device, dtype, GENERATED_ROW_LENGTH)
        drafter = self.build(target, texts, task.seed, task.always_drafted).to(device)
        rows = packed_generations(texts, task.seed).to(device)
        counted: Any = texts  # not read: `train_blocks` gets the rows
        curve = train_blocks(
            drafter,
            self.config,
            PackedTask(target, counted, self.taps(target), rows.tokens.shape[1], task.checkpoint, task.seed, device),
            rows,
        )
        self.save(drafter, target, folder)
        return curve

    def matcher(self, folder: Path, model: Qwen3ForCausalLM, device: torch.device) -> DraftMatcher:
        """Load the saved drafter for its target, in float32; see `DrafterRecipe`."""
        longest = model.config.max_position_embeddings
        target = FrozenTarget.load(Path(model.name_or_path), device, torch.float32, longest)
        return block_matcher(self.load(folder, target), target, self.taps(target))

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
