"""Texts on which drafters of pocket targets are trained: the target's continuations of new prompts, or its corpus."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spec_lab.core.errors import UserError
from spec_lab.corpus.example import render_prompt
from spec_lab.train.config import GenerationsConfig
from spec_lab.train.data import (
    TrainingTokens,
    generate_examples,
    map_in_processes,
    smallest_id_type,
    step_generator,
)
from spec_lab.train.generate import Continuation, generate
from spec_lab.train.reading import reading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

FIRST_SEED = 1_000_000
"""The first of the prompts' seeds if seed=0. The target's training text has lower seeds, as long as `seed` is small."""


@dataclass(frozen=True, slots=True)
class Generations:
    """Rows of prompt and continuation, padded on the right.

    `tokens` is `[rows, length]`, integers. `prompt_lengths` and `lengths` are `[rows]` int32, in tokens.
    """

    tokens: Tensor
    prompt_lengths: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, continuations: list[Continuation], row_length: int, pad_id: int, vocab_size: int) -> Generations:
        """Make rows of continuations, truncated to `row_length`."""
        tokens = np.full((len(continuations), row_length), pad_id, dtype=smallest_id_type(vocab_size, in_torch=True))
        for row, continuation in enumerate(continuations):
            text = (continuation.prompt + continuation.written)[:row_length]
            tokens[row, : len(text)] = text
        prompt_lengths = [len(continuation.prompt) for continuation in continuations]
        lengths = [min(len(c.prompt) + len(c.written), row_length) for c in continuations]
        counts = (torch.tensor(each, dtype=torch.int32) for each in (prompt_lengths, lengths))
        return cls(torch.from_numpy(tokens), *counts)

    def save(self, file: Path) -> None:
        save_file({"tokens": self.tokens, "prompt_lengths": self.prompt_lengths, "lengths": self.lengths}, file)

    @classmethod
    def load(cls, file: Path) -> Generations:
        """Read texts that `save` wrote.

        Raises:
            UserError: the file has other contents.
        """
        with reading(file):
            return cls(**load_file(file))

    def to(self, device: torch.device) -> Generations:
        return Generations(self.tokens.to(device), self.prompt_lengths.to(device), self.lengths.to(device))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return `tokens`, `prompt_lengths` and `lengths`."""
        return self.tokens, self.prompt_lengths, self.lengths

    def batch(self, step: int, batch_size: int, seed: int) -> Generations:
        """Return rows that are drawn by seed and step."""
        device = self.tokens.device
        generator = step_generator(step, seed, device)
        picked = torch.randint(len(self.tokens), (batch_size,), generator=generator, device=device)
        return Generations(self.tokens[picked], self.prompt_lengths[picked], self.lengths[picked])

    def count_written_tokens(self, vocab_size: int) -> Tensor:
        """Return how often each token occurs after a prompt, `[vocab_size]`."""
        column = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        is_written = (column >= self.prompt_lengths[:, None]) & (column < self.lengths[:, None])
        return torch.bincount(self.tokens[is_written].long(), minlength=vocab_size)


class DrafterTexts(Protocol):
    """The texts on which a drafter is trained, with a batch for each step."""

    def to(self, device: torch.device) -> DrafterTexts:
        """Return the same on a device."""

    def batch(self, step: int, batch_size: int, seed: int) -> Generations:
        """Return rows that are drawn by seed and step."""

    def count_written_tokens(self, vocab_size: int) -> Tensor:
        """Return how often each token occurs, `[vocab_size]`: an estimate for the tokens to be drafted."""


@dataclass(frozen=True, slots=True)
class CorpusTexts:
    """The target's own training rows, used instead of texts that it wrote.

    All tokens of a row but the first one count, prompts too.
    """

    tokens: TrainingTokens

    def to(self, device: torch.device) -> CorpusTexts:
        return CorpusTexts(self.tokens.to(device))

    def batch(self, step: int, batch_size: int, seed: int) -> Generations:
        """Return rows that are drawn by seed and step."""
        rows = self.tokens.batch(step, batch_size, seed)
        ones = torch.ones(batch_size, dtype=torch.int32, device=rows.device)
        return Generations(rows, ones, rows.shape[1] * ones)

    def count_written_tokens(self, vocab_size: int) -> Tensor:
        """Return how often each token occurs in the examples, `[vocab_size]`. Natural text is not counted."""
        return torch.bincount(self.tokens.rows.flatten().long(), minlength=vocab_size)


@dataclass(frozen=True, slots=True)
class PromptJob:
    """Prompts of one category for one process to draw."""

    category: str
    seed: int
    num_prompts: int


@dataclass(frozen=True, slots=True)
class GenerationsRecipe:
    """Lets the target write the texts on which drafters are trained."""

    config: GenerationsConfig

    def run(
        self, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, num_workers: int
    ) -> Generations:
        """Continue fresh prompts of the training split, in the model's dtype."""
        texts = [text for part in map_in_processes(draw_prompts, self._jobs(seed), num_workers) for text in part]
        prompts: list[list[int]] = tokenizer(texts)["input_ids"]
        prompts = [prompt for prompt in prompts if len(prompt) < self.config.row_length]
        if not prompts:
            raise UserError(
                f"generations.row_length={self.config.row_length} leaves no room after any of the {len(texts)} "
                "prompts; raise it"
            )
        torch.manual_seed(seed)
        order = torch.randperm(len(prompts)).tolist()
        num_sampled = round(len(prompts) * self.config.sampled_fraction)
        greedy = [prompts[index] for index in order[num_sampled:]]
        sampled = [prompts[index] for index in order[:num_sampled]]
        continuations = generate(model, greedy, self.config.max_new_tokens, self.config.batch_size)
        continuations += generate(
            model, sampled, self.config.max_new_tokens, self.config.batch_size, self.config.temperature
        )
        return Generations.of(continuations, self.config.row_length, tokenizer.pad_token_id, model.config.vocab_size)

    def _jobs(self, seed: int) -> list[PromptJob]:
        from spec_lab.corpus.categories import CHECKABLE_CATEGORIES, NATURAL_CATEGORIES

        numbers = dict.fromkeys(CHECKABLE_CATEGORIES, self.config.num_checkable_prompts)
        numbers |= dict.fromkeys(NATURAL_CATEGORIES, self.config.num_natural_prompts)
        first_seed = FIRST_SEED + seed * self.config.num_shards
        return [
            PromptJob(category, first_seed + shard, -(-number // self.config.num_shards))
            for shard in range(self.config.num_shards)
            for category, number in numbers.items()
        ]


def draw_prompts(job: PromptJob) -> list[str]:
    """Return prompt texts, rendered."""
    examples = generate_examples(job.category, job.seed, job.num_prompts)
    return [render_prompt(example.form, example.prompt) for example in examples]
