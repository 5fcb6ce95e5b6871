"""config.json of the plain families in both spellings: windows, biases, ropes and end tokens."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families import read_decoder, read_model_config
from tests.tiny_checkpoints import TINY_SIZES, Family, make_tiny_target, refused, rewrite_config, use_hub_spelling

FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3")


def read(family: Family = "llama", drop: tuple[str, ...] = (), **changes: Any) -> ModelConfig:
    config = TINY_SIZES | {"model_type": family} | changes
    return read_decoder({key: value for key, value in config.items() if key not in drop}, "folder/config.json")


def windows(config: ModelConfig) -> tuple[int | None, ...]:
    return tuple(plan.window for plan in config.layers)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "options",
    [
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 5},
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0},
        {"use_sliding_window": False, "sliding_window": 24, "max_window_layers": 5},
        {
            "use_sliding_window": True,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
        },
    ],
)
def test_windows_equal_transformers(tmp_path: Path, family: Family, options: dict[str, Any]) -> None:
    model = make_tiny_target(tmp_path, family, **options)
    expected = tuple(layer.self_attn.sliding_window for layer in model.model.layers)
    assert (24 in expected) == options["use_sliding_window"]
    assert windows(read_model_config(tmp_path)) == expected
    if "layer_types" not in options:
        use_hub_spelling(tmp_path)
        rewrite_config(tmp_path, **options)
        assert windows(read_model_config(tmp_path)) == expected


def test_llama_has_no_windows() -> None:
    assert windows(read(sliding_window=16, use_sliding_window=True, max_window_layers=0)) == (None,) * 8


@pytest.mark.parametrize("family", FAMILIES)
def test_end_tokens_are_those_at_which_transformers_ends(tmp_path: Path, family: Family) -> None:
    from transformers import AutoModelForCausalLM

    generations = (None, {}, {"temperature": 0.5}, {"eos_token_id": 0}, {"eos_token_id": [7, 8]})
    make_tiny_target(tmp_path, family, num_hidden_layers=1)
    generation_file = tmp_path / "generation_config.json"
    for in_config, in_generation in product(("absent", None, 5, [5, 6]), generations):
        rewrite_config(tmp_path, drop=("eos_token_id",))
        rewrite_config(tmp_path, **({} if in_config == "absent" else {"eos_token_id": in_config}))
        generation_file.unlink(missing_ok=True)
        if in_generation is not None:
            generation_file.write_text(json.dumps(in_generation))
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=False).generation_config.eos_token_id
        expected = theirs if isinstance(theirs, list) else [] if theirs is None else [theirs]
        assert list(read_model_config(tmp_path).eos_token_ids) == expected, (in_config, in_generation)


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"model_type": "gemma"}, ("model_type 'gemma'", "llama")),
        ({"hidden_act": "gelu"}, ("hidden_act", "silu")),
        ({"layer_types": ["chunked_attention"] * 8}, ("chunked_attention", "full_attention")),
    ],
)
def test_refuses_what_would_be_computed_wrongly(changes: dict[str, Any], fragments: tuple[str, ...]) -> None:
    with refused("folder/config.json", *fragments):
        read(**changes)
