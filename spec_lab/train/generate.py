"""Batched continuation of many prompts by the target."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Continuation:
    """Token ids of a prompt and of what the model wrote after it, its stop token included."""

    prompt: list[int]
    written: list[int]
    finished: bool


def generate(
    model: Qwen3ForCausalLM,
    prompts: list[list[int]],
    max_new_tokens: int,
    batch_size: int,
    temperature: float = 0.0,
) -> list[Continuation]:
    """Continues every prompt until a stop token or `max_new_tokens`; temperature 0 is greedy. In the prompts' order.

    Batches hold prompts of like length, padded on the left. Sampling draws from torch's global generator.
    """
    from transformers import GenerationConfig

    settings = model.generation_config
    stop_ids = settings.eos_token_id
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=stop_ids,
        pad_token_id=settings.pad_token_id,
        **({"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}),
    )
    continuations: dict[int, Continuation] = {}
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for start in range(0, len(by_length), batch_size):
        indices = by_length[start : start + batch_size]
        width = max(len(prompts[index]) for index in indices)
        tokens = torch.full((len(indices), width), settings.pad_token_id)
        mask = torch.zeros(len(indices), width, dtype=torch.long)
        for row, index in enumerate(indices):
            tokens[row, width - len(prompts[index]) :] = torch.tensor(prompts[index])
            mask[row, width - len(prompts[index]) :] = 1
        output = model.generate(
            input_ids=tokens.to(model.device), attention_mask=mask.to(model.device), generation_config=config
        )
        for index, written in zip(indices, output[:, width:].tolist(), strict=True):
            stop = next((at for at, token in enumerate(written) if token in stop_ids), None)
            written = written if stop is None else written[: stop + 1]
            continuations[index] = Continuation(prompts[index], written, stop is not None)
        log.info("continued %d of %d prompts", len(continuations), len(prompts))
    return [continuations[index] for index in range(len(prompts))]
