"""Families that are an entry of the table, beside transformers' tiny random models: logits, and greedy tokens with and
without drafts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_lab.build.limits import engine_limits
from spec_lab.checkpoints.families import read_model_config
from spec_lab.options.trees import StaticTreeConfig
from tests.kernel_lab import DEVICE
from tests.lab import Reference, generate, make_config, random_requests, with_depth_as_k
from tests.target_lane import assert_logits
from tests.tiny_checkpoints import TINY_SIZES, make_tiny_eagle3, randomize, refused, rewrite_config
from tests.tiny_latent import SIZES as LATENT
from tests.tiny_latent import YARN as LATENT_YARN

SIZES = TINY_SIZES | {"vocab_size": 160, "num_hidden_layers": 8}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 128}
LONG = {"rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.75}
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.17,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 3}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("granite", GRANITE),
    "granite_tied_biases": (
        "granite",
        GRANITE | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "ministral3": ("ministral3", {"head_dim": 16, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}}),
    "mistral": ("mistral", {"sliding_window": 6}),
    "mistral_full": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "minimax_m2": ("minimax_m2", EXPERTS | {"head_dim": 16, "rotary_dim": 8}),
    "mixtral": ("mixtral", EXPERTS | {"sliding_window": None}),
    "olmo3": ("olmo3", {"pad_token_id": 0, "sliding_window": 6, "num_hidden_layers": 8, "attention_bias": True}),
    "olmo3_long": ("olmo3", {"pad_token_id": 0, "rope_scaling": YARN, "rope_theta": 100.0}),
    "phi3": ("phi3", {"pad_token_id": 0, "sliding_window": 7}),
    "phi3_long": (
        "phi3",
        {
            "pad_token_id": 0,
            "hidden_size": 64,
            "original_max_position_embeddings": 512,
            "rope_parameters": LONG | {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [2.0] * 6},
        },
    ),
    "smollm3": ("smollm3", {"pad_token_id": 0}),
}


MISTRAL4 = LATENT | {
    "model_type": "mistral4",
    "num_hidden_layers": 8,
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": LATENT_YARN | YARN | {"llama_4_scaling_beta": 0.1},
}
TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
WRAPPED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mistral3": (
        "Mistral3",
        SIZES | KINDS["ministral3"][1] | {"model_type": "ministral3"},
        TOWER | {"model_type": "pixtral", "head_dim": 8, "image_size": 28, "patch_size": 14},
    ),
    "mistral_small_4": (
        "Mistral3",
        MISTRAL4,
        TOWER | {"model_type": "pixtral", "head_dim": 8, "image_size": 28, "patch_size": 14},
    ),
    "kimi_k25": ("Kimi_K25", LATENT | {"model_type": "deepseek_v3"}, TOWER | {"pos_emb_height": 4, "pos_emb_width": 4}),
}


def make_tiny(folder: Path, kind: str, **changes: Any) -> Any:
    """Write a random float32 target, and return it as the transformers model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family, options = KINDS[kind]
    auto: Any = AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(AutoConfig.for_model(family, **SIZES | options | changes)).to(torch.float32).eval()
    randomize(model)
    model.save_pretrained(folder)
    return model


def make_wrapped(folder: Path, kind: str) -> Any:
    """Write a random multimodal model, and return it as transformers has it."""
    import transformers

    name, text, vision = WRAPPED[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, tie_word_embeddings=False)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).to(torch.float32).eval()
    randomize(model)
    model.save_pretrained(folder)
    if kind == "kimi_k25":  # of which transformers 5.23 writes the decoder's layers under the vision tower's `blocks`
        stored = load_file(folder / "model.safetensors")
        hub = {
            name.replace("language_model.model.blocks", "language_model.model.layers"): stored[name] for name in stored
        }
        save_file(hub, folder / "model.safetensors", metadata={"format": "pt"})
        text = json.loads((folder / "config.json").read_text())["text_config"]
        rewrite_config(folder, text_config=text | {"model_type": "kimi_k2"})
    return model


def make(folder: Path, kind: str) -> Any:
    return make_wrapped(folder, kind) if kind in WRAPPED else make_tiny(folder, kind)


@pytest.mark.parametrize("kind", [*KINDS, *WRAPPED])
def test_logits_equal_transformers(tmp_path: Path, kind: str) -> None:
    assert_logits(tmp_path, make(tmp_path, kind), [9, 5, 1, 4, 4, 4])


@pytest.mark.parametrize("kind", [*KINDS, "mistral_small_4"])
def test_greedy_text_is_transformers_whatever_is_drafted(tmp_path: Path, kind: str) -> None:
    """Without drafts, with those of a random head, of which few are right, and with the target's own, which all are."""
    target, head = tmp_path / "target", tmp_path / "head"
    reference, requests = Reference.__new__(Reference), random_requests(3, max_new_tokens=12)
    reference.model = make(target, kind)
    make_tiny_eagle3(head, read_model_config(target))
    plain = {request.request_id: reference.greedy(request) for request in requests}
    for drafter, path, prune in (("none", head, "none"), ("eagle3", head, "catchup"), ("draft_model", target, "none")):
        config = make_config((target, path), drafter, prune=prune, batch_size=2)
        reference.assert_lossless(requests, generate(config, requests), plain)


@pytest.mark.parametrize("kernels", ["native", "triton"])
@pytest.mark.parametrize("kind", ["granite", "minimax_m2", "olmo3", "smollm3"])
def test_other_kernels_give_the_same_tokens(tmp_path: Path, kind: str, kernels: str) -> None:
    """Of a chain, and of a tree; on a CPU in Triton's interpreter."""
    make_tiny(tmp_path, kind, num_hidden_layers=4)
    requests = random_requests(2, max_new_tokens=4, lengths=(2, 7))
    changes: dict[str, Any] = {"batch_size": 2, "device": "cpu" if kernels == "native" else DEVICE.type}
    expected = generate(make_config((tmp_path, tmp_path), "draft_model", **changes), requests)
    config = make_config((tmp_path, tmp_path), "draft_model", kernels=kernels, **changes)
    assert generate(config, requests) == expected
    if kernels == "triton":  # C runs chains
        with_tree = replace(config, tree=StaticTreeConfig(paths=[[1], [0], [0, 0]]))
        assert generate(with_depth_as_k(with_tree), requests) == expected


@pytest.mark.parametrize("kind", ["ministral3", "mistral_small_4"])
def test_a_text_is_refused_where_queries_begin_to_be_scaled(tmp_path: Path, kind: str) -> None:
    make(tmp_path, kind)
    (request,) = random_requests(1, max_new_tokens=40, lengths=(100, 100))
    with refused("longer than 122", "max_new_tokens"):
        engine_limits(make_config((tmp_path, tmp_path), "ngram"), [request])
