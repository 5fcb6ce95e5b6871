"""Gemma 4's config.json: the released sizes, both spellings, the layers an assistant reads, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families import read_decoder, read_model_config
from spec_lab.checkpoints.gemma4_assistant_config import read_assistant_config
from spec_lab.checkpoints.packaged import SHAPES
from spec_lab.checkpoints.plan import RopeConfig
from spec_lab.doctor.aspects import other_sources
from tests.tiny_checkpoints import refused

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
    "26b": _LARGE
    | {
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
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
READ_LAYERS = {"e2b": (13, 14), "e4b": (22, 23), "26b": (28, 29), "31b": (58, 59)}
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


def assistant(size: str, **text: Any) -> dict[str, Any]:
    """The config.json of the assistant of a size."""
    target = RELEASED[size]
    part = {
        "model_type": "gemma4_text",
        "vocab_size": 262_144,
        "hidden_size": 256 if size.startswith("e") else 1024,
        "intermediate_size": 2048 if size.startswith("e") else 8192,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "num_attention_heads": 4 if size.startswith("e") else target["num_attention_heads"],
        "num_key_value_heads": target["num_key_value_heads"],
        "num_global_key_value_heads": target.get("num_global_key_value_heads"),
        "attention_k_eq_v": target.get("attention_k_eq_v", False),
        "sliding_window": target.get("sliding_window", 512),
        "layer_types": [SLIDING] * 3 + [FULL],
        "hidden_size_per_layer_input": 0,
    }
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "backbone_hidden_size": target["hidden_size"],
        "use_ordered_embeddings": size.startswith("e"),
        "text_config": part | text,
    }


@pytest.mark.parametrize("size", RELEASED)
def test_the_layers_that_an_assistant_reads(tmp_path: Path, size: str) -> None:
    """They are the last ones of their type that own their KV, found from the two configs alone."""
    (tmp_path / "config.json").write_text(json.dumps(assistant(size)))
    target = read(size)
    config = read_assistant_config(tmp_path, target)
    sliding, full = READ_LAYERS[size]
    assert config.kv_sources == (sliding, sliding, sliding, full)
    assert target.embedding_scale == RELEASED[size]["hidden_size"] ** 0.5


@pytest.mark.parametrize("size", ["e4b", "31b"])
def test_the_shapes_are_the_released_ones(size: str) -> None:
    """What they spell out is what the released files leave to their defaults."""
    shape = read_model_config(SHAPES / f"gemma4_{size}")
    assert replace(shape, eos_token_ids=(1, 106)) == read(size, bos_token_id=2)


def test_the_doctor_reads_the_kv_of_the_layers_beside(tmp_path: Path) -> None:
    """For both kinds of layers together, and for each kind by itself."""
    (tmp_path / "config.json").write_text(json.dumps(assistant("e2b")))
    config = read_assistant_config(tmp_path, read("e2b"))
    assert other_sources(config) == [(12, 12, 12, 9), (12, 12, 12, 14), (13, 13, 13, 9)]


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "activation": ({"hidden_activation": "silu"}, ("hidden_activation 'silu'", "gelu_pytorch_tanh")),
    "bias": ({"attention_bias": True}, ("attention_bias True",)),
    "both directions": ({"use_bidirectional_attention": "all"}, ("use_bidirectional_attention 'all'", "vision")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    text, fragments = REFUSED[case]
    with refused(SOURCE, *fragments):
        read("e2b", **text)
