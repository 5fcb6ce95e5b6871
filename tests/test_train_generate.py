"""Batched generation against transformers' own, one prompt at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from spec_lab.train.generate import generate, generate_plainly

STOP_IDS = [7, 1]


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.4,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).eval()
    model.generation_config = GenerationConfig(eos_token_id=STOP_IDS, pad_token_id=0, do_sample=False)
    return model


@pytest.mark.parametrize("continue_all", [generate, generate_plainly])
def test_rows_of_any_length_are_continued_as_alone(model: Qwen3ForCausalLM, continue_all: Any) -> None:
    random = torch.Generator().manual_seed(0)
    # No pad token inside: transformers would take it for padding.
    prompts = [torch.randint(1, 40, (length,), generator=random).tolist() for length in (3, 17, 1, 9, 9, 5, 12)]
    continuations = continue_all(model, prompts, max_new_tokens=24, batch_size=4)
    finished = 0
    for prompt, continuation in zip(prompts, continuations, strict=True):
        alone = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=24)[0, len(prompt) :].tolist()
        assert continuation.prompt == prompt
        assert continuation.written == alone
        assert continuation.finished == (alone[-1] in STOP_IDS)
        finished += continuation.finished
    assert 0 < finished < len(prompts), "the case should hold both kinds of end"


def test_sampling_follows_the_distribution(model: Qwen3ForCausalLM) -> None:
    torch.manual_seed(0)
    prompt = [5, 9, 2]
    first = [c.written[0] for c in generate(model, [prompt] * 4000, 1, 4000, temperature=0.7)]
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    expected = torch.softmax(logits / 0.7, dim=-1)
    observed = torch.bincount(torch.tensor(first), minlength=40) / 4000
    assert (observed - expected).abs().sum() < 0.1
