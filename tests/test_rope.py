"""Rotary tables against the rotary embedding of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spec_lab.checkpoints.families import read_decoder
from spec_lab.checkpoints.plan import RopeConfig
from spec_lab.models.rope import inverse_frequencies, rope_tables

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
    "llama3": LLAMA3,
    "llama3_unusual": LLAMA3 | {"factor": 3.0, "low_freq_factor": 2.0, "original_max_position_embeddings": 300},
}


def read_rope(rope: dict[str, Any]) -> RopeConfig:
    config = {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 128,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "rope_parameters": rope,
    }
    return read_decoder(config, "config.json").only_layer.rope


def reference_embedding(rope: dict[str, Any]) -> Any:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=128, num_attention_heads=4, head_dim=64, max_position_embeddings=1024, rope_parameters=dict(rope)
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("name", ROPES)
def test_tables_equal_transformers(name: str) -> None:
    reference = reference_embedding(ROPES[name])
    config = read_rope(ROPES[name])
    assert torch.equal(inverse_frequencies(config, 64), reference.inv_freq)

    cos, sin = rope_tables(config, 64, 700, torch.float32, "cpu")
    expected_cos, expected_sin = reference(torch.zeros(1), torch.arange(700).unsqueeze(0))
    assert cos.shape == sin.shape == (700, 64)
    torch.testing.assert_close(cos, expected_cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(sin, expected_sin[0], rtol=0, atol=1e-6)


def test_tables_are_cast_after_the_float32_angles() -> None:
    """In bf16 neighbouring positions past 256 would have one angle."""
    config = read_rope(ROPES["default"])
    full, _ = rope_tables(config, 64, 600, torch.float32, "cpu")
    cast, _ = rope_tables(config, 64, 600, torch.bfloat16, "cpu")
    assert cast.dtype == torch.bfloat16
    assert torch.equal(cast, full.to(torch.bfloat16))


def test_frequencies_do_not_depend_on_the_default_dtype() -> None:
    rope = RopeConfig(theta=10000.0, scaling="none")
    expected = inverse_frequencies(rope, 64)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(inverse_frequencies(rope, 64), expected)
    finally:
        torch.set_default_dtype(torch.float32)
