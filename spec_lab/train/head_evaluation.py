"""Evaluates a finished drafter by category, on question files that are for testing."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from spec_lab.checkpoints.families.table import read_model_config
from spec_lab.core.types import Request
from spec_lab.train.config import EvaluationConfig
from spec_lab.train.decoded import decoded
from spec_lab.train.drafter_config import PackedTrainingConfig
from spec_lab.train.head_training import serving_of
from spec_lab.train.texts.prompts import read_prompts
from spec_lab.workloads.tokenizer import TargetTokenizer

log = logging.getLogger(__name__)

LONGEST_PROMPT = 4096
"""The most tokens of a question; longer ones are left out."""


def evaluated(
    path: Path,
    device: torch.device,
    trained: PackedTrainingConfig,
    drafter: Path,
    knobs: EvaluationConfig,
    thinking: bool | None,
) -> dict[str, Any]:
    """Decode the first turns of questions with the drafter and with ngram lookup, and return the figures.

    Without a question that is short enough, return {}.

    `thinking` is the option of the chat template with which the drafter's texts were written.
    """
    tokenizer = TargetTokenizer(path, thinking)
    conversations, counts = read_prompts(knobs.prompts, 0, allow_tests=True)
    requests = [
        Request(each.prompt_id, each.category, tuple(tokenizer.encode_conversation(each.turns, each.system)), 0)
        for each in first_of_each_category(conversations, knobs.limit_per_category)
    ]
    longest = min(LONGEST_PROMPT, read_model_config(path).max_position_embeddings - knobs.max_new_tokens)
    kept = [
        Request(request.request_id, request.category, request.prompt_ids, knobs.max_new_tokens)
        for request in requests
        if len(request.prompt_ids) <= longest
    ]
    unread = {**counts, "too_long": len(requests) - len(kept)}
    if not kept:
        log.warning(
            "evaluation.prompts: none of %d questions leaves room for evaluation.max_new_tokens=%d; none counts",
            len(requests),
            knobs.max_new_tokens,
        )
        return {}
    few = replace(knobs, batch_size=min(knobs.batch_size, 64))
    serving, name = serving_of(path, device, kept, few, trained.drafter_words), trained.drafts_as
    return {
        "files": [Path(file).name for file in knobs.prompts],
        "unread": unread,
        name: decoded(serving, name, drafter, kept),
        "ngram": decoded(serving, "ngram", None, kept),
    }


def first_of_each_category(conversations: list[Any], limit: int | None) -> list[Any]:
    """Return all conversations, or the first `limit` of each category."""
    seen: dict[str, int] = {}
    kept = []
    for conversation in conversations:
        seen[conversation.category] = seen.get(conversation.category, 0) + 1
        if limit is None or seen[conversation.category] <= limit:
            kept.append(conversation)
    return kept
