"""Gemma 4's config.json: the released sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families import read_decoder, read_model_config
from spec_lab.checkpoints.packaged import SHAPES
from spec_lab.checkpoints.plan import RopeConfig

SLIDING, FULL = "sliding_attention", "full_attention"
_LARGE = {
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262_144,
    "use_bidirectional_attention": "vision",
}
# The text part of the released files; keys that have transformers' default are left out here and there.
RELEASED: dict[str, dict[str, Any]] = {
    "e2b": {
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_global_key_value_heads": None,
        "layer_types": ([SLIDING] * 4 + [FULL]) * 7,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
    },
    "e4b": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 42,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 18,
    },
    "31b": _LARGE
    | {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
    },
}
SOURCE = "config.json"


def released(size: str, **text: Any) -> dict[str, Any]:
    """The config.json of a size, as the hub has it."""
    part = RELEASED[size] | {"model_type": "gemma4_text", "final_logit_softcapping": 30.0} | text
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "dtype": "bfloat16",
        "eos_token_id": [1, 106],
        "tie_word_embeddings": True,
        "text_config": part,
        "vision_config": {"hidden_size": 768},
    }


def read(size: str, **text: Any) -> ModelConfig:
    return read_decoder(released(size, **text), SOURCE)


def test_the_layers_of_e2b() -> None:
    """Twenty layers read what the last two before them wrote, and have MLPs of twice the width."""
    config = read("e2b")
    assert config.gemma4 is not None
    assert (config.gemma4.per_layer_width, config.gemma4.logit_softcap, config.num_layers) == (256, 30.0, 35)
    assert config.gemma4.embedding_scale == 1536**0.5 and not config.gemma4.keys_are_values
    assert config.tie_word_embeddings and config.eos_token_ids == (1, 106)
    owners = [plan.kv_owner for plan in config.layers]
    assert owners[:15] == [None] * 15
    assert owners[15:] == ([13] * 4 + [14]) * 4
    assert [plan.intermediate_size for plan in config.layers] == [6144] * 15 + [12288] * 20
    assert [plan.window for plan in config.layers[:6]] == [512, 512, 512, 512, None, 512]
    assert (config.layers[4].head_dim, config.layers[5].head_dim) == (512, 256)
    assert config.layers[4].rope == RopeConfig(1e6, "proportional", partial_rotary_factor=0.25)
    assert config.layers[5].rope == RopeConfig(1e4, "none")


@pytest.mark.parametrize("size", ["e4b", "31b"])
def test_the_shapes_are_the_released_ones(size: str) -> None:
    """What they spell out is what the released files leave to their defaults."""
    shape = read_model_config(SHAPES / f"gemma4_{size}")
    assert replace(shape, eos_token_ids=(1, 106)) == read(size, bos_token_id=2)
