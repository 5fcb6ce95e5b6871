"""Targets with latent attention against transformers in float32: logits, features and the rows of the cache."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.build.limits import engine_limits
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.plan import LatentSizes
from spec_lab.core.types import FeatureSpec, NormSide
from tests.lab import Reference, generate, make_config, random_requests
from tests.target_lane import PAGE_SIZE, made_once, make_lane, random_tokens
from tests.tiny_checkpoints import refused, rewrite_config, use_hub_spelling
from tests.tiny_latent import make_latent_target

DENSE = {"first_k_dense_replace": 4}
INDEXED = {"index_topk": 128, "index_n_heads": 2, "index_head_dim": 16}
LITE_SIZES = {"qk_nope_head_dim": 12, "v_head_dim": 20, "n_group": 1, "topk_group": 1}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", DENSE),
    "no_narrow_query": ("deepseek_v3", DENSE | {"q_lora_rank": None, "tie_word_embeddings": True}),
    "biases": ("deepseek_v3", DENSE | {"attention_bias": True}),
    "wide_values": ("deepseek_v3", DENSE | {"qk_nope_head_dim": 10, "v_head_dim": 14}),
    "two_halves": ("deepseek_v3", DENSE | {"rope_interleave": False}),
    "plain_rope": ("deepseek_v3", DENSE | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "deepseek_v32": ("deepseek_v32", DENSE | INDEXED),
    "glm4_moe_lite": ("glm4_moe_lite", LITE_SIZES | {"mlp_layer_types": ["dense"] * 4}),
    "deepseek_v3_experts": ("deepseek_v3", {}),
    "glm4_moe_lite_experts": ("glm4_moe_lite", LITE_SIZES),
    "deepseek_v32_experts": ("deepseek_v32", INDEXED | {"n_shared_experts": 2, "q_lora_rank": 20}),
}
LENGTH = 100
FEATURES = FeatureSpec(layer_inputs=(0, 2, 3), final_hidden=NormSide.POST_NORM)


@dataclass
class Ran:
    """What a target made of a text: logits and features of its rows, and the rows of each layer's cache."""

    logits: torch.Tensor
    features: torch.Tensor
    cached: list[torch.Tensor]


@torch.inference_mode()
def run(folder: Path, token_ids: torch.Tensor, parts: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Ran:
    lane = make_lane(folder, LENGTH, dtype=dtype)
    logits, features = lane.run_parts(token_ids[None], parts, FEATURES)
    assert features is not None
    positions = torch.arange(LENGTH)
    slots = lane.table.pages[0][positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    return Ran(logits, features, [layer.kv[slots] for layer in lane.cache.layers])


@torch.inference_mode()
def transformers_run(model: Any, token_ids: torch.Tensor) -> Ran:
    output = model(token_ids[None], output_hidden_states=True, use_cache=True)
    taps = [output.hidden_states[layer][0] for layer in (*FEATURES.layer_inputs, -1)]
    cached = [torch.cat((layer.keys, layer.values), dim=-1)[0, 0] for layer in output.past_key_values.layers]
    return Ran(output.logits[0], torch.cat(taps, dim=-1), cached)


def make_kind(folder: Path, kind: str) -> Any:
    model_type, options = KINDS[kind]
    return make_latent_target(folder, model_type, **options)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder and the transformers model of each kind, made once."""

    return made_once(tmp_path_factory, make_kind)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_features_and_cache_rows_equal_transformers(checkpoints: Any, tmp_path: Path, kind: str) -> None:
    """Past the positions that YaRN starts from, in one chunk and in several, and in both spellings of the rope."""
    folder, model = checkpoints(kind)
    token_ids = random_tokens(LENGTH)
    expected = transformers_run(model, token_ids)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    use_hub_spelling(tmp_path)
    for place, parts in ((folder, (40, 1, 4, 55)), (folder, (100,)), (tmp_path, (100,))):
        got = run(place, token_ids, parts)
        torch.testing.assert_close(got.logits, expected.logits, rtol=0, atol=2e-5)
        torch.testing.assert_close(got.features, expected.features, rtol=0, atol=2e-5)
        for ours, theirs in zip(got.cached, expected.cached, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe_lite"])
@torch.inference_mode()
def test_bfloat16_is_as_close_to_float32_as_transformers(checkpoints: Any, kind: str) -> None:
    """Absorbed queries and unfolded keys round in other places than transformers does, and no worse."""
    folder, model = checkpoints(kind)
    token_ids = random_tokens(LENGTH)
    exact = model(token_ids[None]).logits[0]
    theirs = copy.deepcopy(model).bfloat16()(token_ids[None]).logits[0].float()
    for parts in ((100,), (20,) + (4,) * 20):
        ours = run(folder, token_ids, parts, torch.bfloat16).logits
        assert ours.dtype == torch.bfloat16
        assert (ours.float() - exact).abs().mean() < 1.3 * (theirs - exact).abs().mean()


def test_few_rows_are_absorbed_and_a_long_chunk_is_unfolded(checkpoints: Any) -> None:
    """The parts above take both ways; with DeepSeek-V3's sizes the border lies at 170 rows of a long context."""
    latent = read_model_config(checkpoints("deepseek_v3")[0]).layers[0].latent
    assert latent is not None
    cases = ((40, 40), (1, 41), (4, 45), (55, 100))
    assert [latent.unfolding_is_cheaper(*case) for case in cases] == [True, False, False, True]
    v3 = LatentSizes(1536, 512, 128, 64, 128)
    assert not v3.unfolding_is_cheaper(160, 100_000) and v3.unfolding_is_cheaper(180, 100_000)
    assert not v3.unfolding_is_cheaper(16, 64) and v3.unfolding_is_cheaper(16, 16)


def test_kimi_k2_is_read_as_deepseek_v3(checkpoints: Any, tmp_path: Path) -> None:
    """transformers does not know its model_type, and the files name DeepSeek's class."""
    folder, _ = checkpoints("deepseek_v3")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    rewrite_config(tmp_path, model_type="kimi_k2")
    assert read_model_config(tmp_path).family == "kimi_k2"
    assert read_model_config(tmp_path).layers == read_model_config(folder).layers


@pytest.mark.parametrize(("kind", "batch_size"), [("deepseek_v3_experts", 3), ("glm4_moe_lite_experts", 1)])
def test_text_equals_greedy_decoding_by_transformers(checkpoints: Any, kind: str, batch_size: int) -> None:
    """Drafts of an n-gram lookup, so that rows are verified, rejected and written over."""
    folder, _ = checkpoints(kind)
    requests = random_requests(4, max_new_tokens=20, lengths=(3, 40))
    config = make_config((folder, folder), "ngram", batch_size=batch_size)
    reference = Reference(folder)
    plain = {request.request_id: reference.greedy(request) for request in requests}
    reference.assert_lossless(requests, generate(config, requests), plain)


def test_sparse_attention_is_refused_where_it_would_begin(checkpoints: Any) -> None:
    """DeepSeek-V3.2 equals V3 up to `index_topk` keys; drafts count."""
    folder, _ = checkpoints("deepseek_v32")
    (request,) = random_requests(1, max_new_tokens=20, lengths=(102, 102))
    config = make_config((folder, folder), "ngram", num_draft_tokens=3)
    chosen = config
    assert engine_limits(chosen, [request]).max_seq_len == 122
    with refused("r0", "longer than 122", "max_new_tokens"):
        engine_limits(chosen, [replace(request, max_new_tokens=21)])
