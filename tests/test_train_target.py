"""What one forward of the target leaves for drafters to read."""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from spec_lab.train.target import run_target


def test_outputs_are_what_head_taps_and_cache_hold() -> None:
    torch.manual_seed(2)
    config = Qwen3Config(
        vocab_size=20,
        hidden_size=12,
        intermediate_size=16,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        initializer_range=0.5,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).eval().requires_grad_(False)
    model.model.norm.weight.uniform_(0.5, 2.0)
    tokens = torch.randint(20, (2, 9))
    outputs = run_target(model, tokens)

    plain = model(tokens, output_hidden_states=True)
    torch.testing.assert_close(outputs.logits, plain.logits)
    torch.testing.assert_close(outputs.final_hidden @ model.lm_head.weight.T, plain.logits)
    torch.testing.assert_close(outputs.taps(), torch.cat([plain.hidden_states[i] for i in (2, 4, 5)], dim=-1))
    assert len(outputs.layer_inputs) == len(outputs.keys_values) == 8
    cos_sin = model.model.rotary_emb(outputs.final_hidden, torch.arange(9)[None])
    for layer, hidden, (keys, values) in zip(
        model.model.layers, outputs.layer_inputs, outputs.keys_values, strict=True
    ):
        attention, entering = layer.self_attn, layer.input_layernorm(hidden)
        expected = attention.k_norm(attention.k_proj(entering).view(2, 9, 2, 6)).transpose(1, 2)
        torch.testing.assert_close(keys, apply_rotary_pos_emb(expected, expected, *cos_sin)[1])
        torch.testing.assert_close(values, attention.v_proj(entering).view(2, 9, 2, 6).transpose(1, 2))
