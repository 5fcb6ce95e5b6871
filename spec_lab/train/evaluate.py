"""Measures target and drafter on the shipped prompts: accuracy, certainty, and acceptance of drafts.

Everything is computed in float32 from the stored weights, like the engine on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spec_lab.acceptance.phase import ThinkingMarkers, phase_before
from spec_lab.corpus.example import THINK_END, THINK_START, render_prompt
from spec_lab.train.config import EvaluationConfig
from spec_lab.train.drafter import DraftMatcher
from spec_lab.train.generate import Continuation, generate_plainly
from spec_lab.train.generations import Generations
from spec_lab.train.rounds import RoundCounts
from spec_lab.train.target import run_target
from spec_lab.workloads.checker import is_correct
from spec_lab.workloads.prompt_files import Prompt, shipped_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

UNCERTAIN_BELOW = 0.6


def load_prompts(limit_per_category: int | None) -> list[Prompt]:
    """Read the shipped prompts, or the first `limit_per_category` of each category."""
    categories = groupby(shipped_prompts(), key=lambda prompt: prompt.category)
    return [prompt for _, prompts in categories for prompt in islice(prompts, limit_per_category)]


@dataclass(slots=True)
class ConfidenceCounts:
    """The target's confidence in its greedy text, counted over one row for each written token."""

    num_rows: int = 0
    num_uncertain: int = 0
    sum_entropy: float = 0.0

    def add(self, top_probability: Tensor, entropy: Tensor) -> None:
        """Count rows, given as two vectors of equal length; entropy in nats."""
        self.num_rows += len(top_probability)
        self.num_uncertain += int((top_probability < UNCERTAIN_BELOW).sum())
        self.sum_entropy += float(entropy.sum())

    def pool(self, other: ConfidenceCounts) -> None:
        self.num_rows += other.num_rows
        self.num_uncertain += other.num_uncertain
        self.sum_entropy += other.sum_entropy

    def report(self) -> dict[str, float | int | None]:
        share, entropy = (
            (total / self.num_rows if self.num_rows else None) for total in (self.num_uncertain, self.sum_entropy)
        )
        return {"rows": self.num_rows, "uncertain_share": share, "mean_entropy": entropy}


@dataclass(slots=True)
class CategoryCounts:
    """The counts of one category, or pooled over several."""

    rounds: RoundCounts
    thinking_rows: ConfidenceCounts = field(default_factory=ConfidenceCounts)
    other_rows: ConfidenceCounts = field(default_factory=ConfidenceCounts)
    num_prompts: int = 0
    num_finished: int = 0
    num_written: int = 0
    num_checkable: int = 0
    num_correct: int = 0

    def pool(self, other: CategoryCounts) -> None:
        self.rounds.add(other.rounds)
        self.thinking_rows.pool(other.thinking_rows)
        self.other_rows.pool(other.other_rows)
        self.num_prompts += other.num_prompts
        self.num_finished += other.num_finished
        self.num_written += other.num_written
        self.num_checkable += other.num_checkable
        self.num_correct += other.num_correct

    def report(self) -> dict[str, object]:
        """Return counts, and rates, which are None if there is nothing to count."""
        return {
            "prompts": self.num_prompts,
            "accuracy": self.num_correct / self.num_checkable if self.num_checkable else None,
            "acceptance_length": self.rounds.acceptance_length,
            "acceptance_rates": self.rounds.acceptance_rates,
            "rounds": self.rounds.num_rounds,
            "cut_rounds": self.rounds.num_cut_rounds,
            "thinking": self.thinking_rows.report(),
            "other": self.other_rows.report(),
            "thinking_tokens": self.thinking_rows.num_rows / self.num_prompts,
            "written_tokens": self.num_written / self.num_prompts,
            "finished_share": self.num_finished / self.num_prompts,
        }


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt with the target's text, for a human reader."""

    id: str
    prompt: str
    written: str
    answer: str | None
    correct: bool | None


@dataclass(frozen=True, slots=True)
class EvaluationRecipe:
    """Measures a target, and how well a drafter predicts its texts."""

    config: EvaluationConfig

    def run(
        self, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, match: DraftMatcher | None
    ) -> tuple[dict[str, object], list[Sample]]:
        """Return the report by category and pooled, and a few texts. Without a drafter no rounds are counted."""
        return self.measure(model, tokenizer, match, self.continuations(model, tokenizer))

    def continuations(self, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> list[Continuation]:
        """Let the target continue the prompts, greedily."""
        prompt_ids = tokenizer(_texts(load_prompts(self.config.limit_per_category)))["input_ids"]
        return generate_plainly(model, prompt_ids, self.config.max_new_tokens, self.config.batch_size)

    def measure(
        self,
        model: Qwen3ForCausalLM,
        tokenizer: PreTrainedTokenizerFast,
        match: DraftMatcher | None,
        continuations: list[Continuation],
    ) -> tuple[dict[str, object], list[Sample]]:
        """Measure the texts that `continuations` returned. Several drafters can be measured on the same texts."""
        prompts = load_prompts(self.config.limit_per_category)
        texts = _texts(prompts)
        counts: dict[str, CategoryCounts] = {}
        samples: list[Sample] = []
        markers = ThinkingMarkers(*tokenizer.convert_tokens_to_ids([THINK_START, THINK_END]))
        for index, rows in self._measured_rows(model, continuations, match):
            prompt, continuation = prompts[index], continuations[index]
            category = counts.setdefault(prompt.category, CategoryCounts(RoundCounts(self.config.num_draft_tokens)))
            text = tokenizer.decode(continuation.written)
            correct = None if prompt.answer is None else is_correct(prompt.answer, text)
            _count(category, continuation, correct, rows, markers)
            if category.num_prompts <= self.config.samples_per_category:
                samples.append(Sample(prompt.prompt_id, texts[index], text, prompt.answer, correct))
        pooled = CategoryCounts(RoundCounts(self.config.num_draft_tokens))
        for category in counts.values():
            pooled.pool(category)
        report = {
            "num_draft_tokens": self.config.num_draft_tokens,
            "max_new_tokens": self.config.max_new_tokens,
            "uncertain_below": UNCERTAIN_BELOW,
            "pooled": pooled.report(),
            "by_category": {name: category.report() for name, category in counts.items()},
        }
        return report, samples

    def _measured_rows(
        self, model: Qwen3ForCausalLM, continuations: list[Continuation], match: DraftMatcher | None
    ) -> Iterator[tuple[int, MeasuredRows]]:
        """Yield index and measurements of every continuation, with a few rows in each forward."""
        width = max(len(c.prompt) + len(c.written) for c in continuations)
        for start in range(0, len(continuations), self.config.rows_per_forward):
            part = continuations[start : start + self.config.rows_per_forward]
            tokens = (
                Generations.of(part, width, pad_id=0, vocab_size=model.config.vocab_size).tokens.long().to(model.device)
            )
            log_probabilities = run_target(model, tokens).logits.float().log_softmax(-1)
            top_probability = log_probabilities.amax(-1).exp().cpu()
            entropy = -(log_probabilities.exp() * log_probabilities).sum(-1).cpu()
            num_matches = None
            if match is not None:
                num_matches = match(tokens, self.config.num_draft_tokens).int().cumprod(-1).sum(-1).cpu()
            for row in range(len(part)):
                matches = None if num_matches is None else num_matches[row].tolist()
                yield start + row, MeasuredRows(top_probability[row], entropy[row], matches)


def _texts(prompts: list[Prompt]) -> list[str]:
    return [render_prompt(prompt.form, prompt.text) for prompt in prompts]


@dataclass(frozen=True, slots=True)
class MeasuredRows:
    """Measurements of one text by position: top probability and entropy of the next token, and the number of leading
    drafts that agree."""

    top_probability: Tensor
    entropy: Tensor
    num_matches: list[int] | None


def _count(
    counts: CategoryCounts,
    continuation: Continuation,
    correct: bool | None,
    rows: MeasuredRows,
    markers: ThinkingMarkers,
) -> None:
    prompt_length, num_written = len(continuation.prompt), len(continuation.written)
    counts.num_prompts += 1
    counts.num_finished += continuation.finished
    counts.num_written += num_written
    counts.num_checkable += correct is not None
    counts.num_correct += correct is True
    # The row at position p predicts the token at p+1.
    predicting = slice(prompt_length - 1, prompt_length - 1 + num_written)
    top_probability, entropy = rows.top_probability[predicting], rows.entropy[predicting]
    phases = phase_before(continuation.prompt, continuation.written, markers)
    thinking = torch.tensor(phases, dtype=torch.bool)
    counts.thinking_rows.add(top_probability[thinking], entropy[thinking])
    counts.other_rows.add(top_probability[~thinking], entropy[~thinking])
    if rows.num_matches is not None:
        counts.rounds.walk(rows.num_matches, prompt_length, prompt_length + num_written)


def format_table(report: dict) -> str:  # type: ignore[type-arg]
    """Write the report as a Markdown table, with a row for each category and one for all."""
    lines = [
        "| category | accuracy | acceptance length | rate by position | thinking rows < .6 | other rows < .6 "
        "| thinking tokens | written | finished |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in [*report["by_category"].items(), ("all", report["pooled"])]:
        rates = " ".join(_cell(rate, ".2f") for rate in row["acceptance_rates"])
        lines.append(
            f"| {name} | {_cell(row['accuracy'], '.3f')} | {_cell(row['acceptance_length'], '.2f')} | {rates} "
            f"| {_cell(row['thinking']['uncertain_share'], '.3f')} | {_cell(row['other']['uncertain_share'], '.3f')} "
            f"| {row['thinking_tokens']:.0f} | {row['written_tokens']:.0f} | {row['finished_share']:.2f} |"
        )
    return "\n".join(lines)


def _cell(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
