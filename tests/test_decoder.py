"""Targets against transformers in float32: every family, prompts in one piece or in chunks, one row or N rows."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.checkpoints.plan import RopeConfig
from spec_lab.core.types import FeatureSpec, NormSide
from spec_lab.models.linear import make_linear
from spec_lab.models.rope import rope_tables
from tests.onednn import needs_rows_alike
from tests.target_lane import assert_last_row_alone, made_once, make_lane, random_tokens
from tests.tiny_checkpoints import Family, make_tiny_target, use_hub_spelling

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
SLIDING = {"use_sliding_window": True, "sliding_window": 6}
KINDS: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_llama3_rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama_linear_rope": ("llama", {"rope_parameters": LINEAR}),
    "llama_one_kv_head": ("llama", {"num_key_value_heads": 1, "head_dim": 24}),
    "llama_sharded": ("llama", {"max_shard_size": "20KB"}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied_all_kv_heads": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen2_sliding": ("qwen2", SLIDING | {"max_window_layers": 3}),
    "qwen3": ("qwen3", {}),
    "qwen3_tied_biases": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3_sliding": ("qwen3", SLIDING | {"max_window_layers": 0, "rope_parameters": LINEAR}),
}
LENGTH, VOCAB = 27, 160
PARTS = {
    "whole": [27],
    "chunks_of_5": [5, 5, 5, 5, 5, 2],
    "one_row": [9] + [1] * 18,
    "rows_of_4": [3] + [4] * 6,
}


@dataclass
class Reference:
    logits: torch.Tensor
    features: torch.Tensor


ALL_FEATURES = FeatureSpec(layer_inputs=(0, 2, 4, 7), final_hidden=NormSide.POST_NORM)


@torch.inference_mode()
def transformers_rows(model: Any, token_ids: torch.Tensor) -> Reference:
    """transformers' logits [batch, length, vocab], its layer inputs, and the final hidden state after the norm."""
    output = model(token_ids, output_hidden_states=True)
    taps = [output.hidden_states[layer] for layer in (*ALL_FEATURES.layer_inputs, -1)]
    return Reference(output.logits, torch.cat(taps, dim=-1))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder and the transformers model of each kind, made once."""

    return made_once(tmp_path_factory, lambda folder, kind: make_tiny_target(folder, KINDS[kind][0], **KINDS[kind][1]))


@pytest.mark.parametrize("spelling", ["transformers", "hub"])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_logits_and_features_equal_transformers(checkpoints: Any, tmp_path: Path, kind: str, spelling: str) -> None:
    """Sequences longer than the window, over page borders, whole and chunked; of some kinds one row and N rows at a
    time."""
    folder, model = checkpoints(kind)
    if spelling == "hub":
        for file in folder.iterdir():
            (tmp_path / file.name).symlink_to(file)
        (tmp_path / "config.json").unlink()
        (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
        use_hub_spelling(tmp_path)
        folder = tmp_path
    token_ids = random_tokens(1, LENGTH)
    reference = transformers_rows(model, token_ids)
    cuts = list(PARTS) if kind in ("llama", "qwen2_sliding", "qwen3_sliding") else ["whole", "chunks_of_5"]
    for parts in [PARTS[cut] for cut in (cuts if spelling == "transformers" else ["whole"])]:
        logits, features = make_lane(folder, LENGTH).run_parts(token_ids, parts, ALL_FEATURES)
        torch.testing.assert_close(logits, reference.logits[0], rtol=0, atol=1e-4)
        torch.testing.assert_close(features, reference.features[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen2_sliding", "qwen3_sliding"])
@torch.inference_mode()
def test_ragged_verify_rows_equal_transformers(checkpoints: Any, kind: str) -> None:
    """N rows of three requests of different lengths in one forward."""
    folder, model = checkpoints(kind)
    token_ids, lens = random_tokens(3, LENGTH), [1, 11, 20]
    reference = transformers_rows(model, token_ids)
    logits = make_lane(folder, LENGTH, num_requests=3).verify_ragged(token_ids, lens)
    for request, length in enumerate(lens):
        torch.testing.assert_close(logits[request], reference.logits[request, length : length + 4], rtol=0, atol=1e-4)


@torch.inference_mode()
def test_rejected_rows_leave_nothing_that_the_next_round_sees(checkpoints: Any) -> None:
    """Four rows with wrong drafts, then four right ones from the position after the first."""
    folder, model = checkpoints("qwen3_sliding")
    token_ids = random_tokens(1, LENGTH)
    lane = make_lane(folder, LENGTH)
    lane.run(token_ids[:, :10], [0], ALL_FEATURES)
    wrong = torch.cat((token_ids[:, 10:11], VOCAB - 1 - token_ids[:, 11:14]), dim=1)
    lane.run(wrong, [10], ALL_FEATURES)
    logits = lane.target.logits(lane.run(token_ids[:, 11:15], [11], ALL_FEATURES).hidden)
    expected = transformers_rows(model, token_ids).logits[0, 11:15]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama_biases", "qwen2_sliding", "qwen3"])
@torch.inference_mode()
def test_bfloat16_is_as_close_to_float32_as_transformers(checkpoints: Any, kind: str) -> None:
    """Norms, rotary tables and masks are cast where transformers casts them."""
    folder, model = checkpoints(kind)
    token_ids = random_tokens(1, LENGTH)
    exact = model(token_ids).logits[0]
    theirs = copy.deepcopy(model).bfloat16()(token_ids).logits[0].float()
    ours, _ = make_lane(folder, LENGTH, dtype=torch.bfloat16).run_parts(token_ids, (9, 9, 9), FeatureSpec())
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - exact).abs().mean() < 1.3 * (theirs - exact).abs().mean()


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_sliding"])
def test_the_last_layer_keeps_the_selected_rows_only(checkpoints: Any, kind: str) -> None:
    lanes = [make_lane(checkpoints(kind)[0], LENGTH) for _ in range(3)]
    assert_last_row_alone(lanes, random_tokens(1, 13), FeatureSpec(layer_inputs=(2, 4, 5)))


@needs_rows_alike
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 32), (160, 48), (768, 256)])
def test_a_product_of_one_row_and_of_many_are_bit_equal_on_a_cpu(
    out_features: int, in_features: int, bias: bool
) -> None:
    """`models.linear` packs its weights for this; F.linear differs here in most numbers."""
    torch.manual_seed(0)
    weight, rows = torch.randn(out_features, in_features), torch.randn(64, in_features)
    linear = make_linear(weight, torch.randn(out_features) if bias else None)
    one = torch.cat([linear(row) for row in rows.split(1)])
    for count in (2, 3, 4, 6, 8, 16, 64):
        assert torch.equal(torch.cat([linear(part) for part in rows.split(count)]), one), count
    torch.testing.assert_close(one, torch.nn.functional.linear(rows, weight, linear.bias), rtol=1e-4, atol=1e-4)  # type: ignore[attr-defined]


def test_rotary_tables_are_cast_after_the_float32_angles() -> None:
    """In bf16 neighbouring positions past 256 would have one angle."""
    rope = RopeConfig(theta=10000.0, scaling="none")
    full, cast = (rope_tables(rope, 64, 600, dtype, "cpu")[0] for dtype in (torch.float32, torch.bfloat16))
    assert torch.equal(cast, full.to(torch.bfloat16))
