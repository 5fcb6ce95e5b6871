"""YaRN's tables and its correction of the scores, as configs of DeepSeek and Kimi write it, against transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from spec_lab.checkpoints.families import read_decoder
from spec_lab.checkpoints.plan import RopeConfig
from spec_lab.models.rope import inverse_frequencies, rope_tables

V3 = {
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
ROPES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"rope_theta": 10000.0} | V3,
    "kimi_k2": {"rope_theta": 50000.0} | V3 | {"factor": 32.0, "beta_fast": 1.0},
    "two_scales": {"rope_theta": 10000.0} | V3 | {"mscale": 0.707, "mscale_all_dim": 1.3},
    "no_scales": {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "scale_of_0": {"rope_theta": 10000.0} | V3 | {"mscale_all_dim": 0.0},
    "given_amplitude": {"rope_theta": 10000.0} | V3 | {"attention_factor": 1.7},
    "part_channels": {"rope_theta": 10000.0} | V3 | {"truncate": False},
}
WIDTH, MAX_POSITIONS = 64, 163840


@dataclass(frozen=True)
class ScoredRope:
    rope: RopeConfig
    mscale: float


def read(rope: dict[str, Any], spelling: str) -> ScoredRope:
    if spelling == "transformers":
        config = {"rope_parameters": {"rope_type": "yarn", **rope}}
    else:
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        config = {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "yarn", **scaling}}
    sizes = {"model_type": "deepseek_v3", "num_hidden_layers": 1, "max_position_embeddings": MAX_POSITIONS}
    plan = read_decoder(sizes | config, "config.json").only_layer
    assert plan.latent is not None
    return ScoredRope(plan.rope, plan.latent.mscale)


def reference(rope: dict[str, Any]) -> tuple[Any, float]:
    """transformers' rotary embedding, and what it multiplies the scores by beside the width's square root."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

    parameters = {"rope_type": "yarn", **rope}
    config = DeepseekV3Config(qk_rope_head_dim=WIDTH, max_position_embeddings=MAX_POSITIONS, rope_parameters=parameters)
    return modeling.DeepseekV3RotaryEmbedding(config), modeling.yarn_apply_mscale(config.rope_parameters, 1.0)


@pytest.mark.parametrize("spelling", ["transformers", "hub"])
@pytest.mark.parametrize("name", ROPES)
def test_tables_and_scores_equal_transformers(name: str, spelling: str) -> None:
    embedding, factor = reference(ROPES[name])
    scored = read(ROPES[name], spelling)
    torch.testing.assert_close(inverse_frequencies(scored.rope, WIDTH), embedding.inv_freq, rtol=1e-6, atol=0)
    assert scored.mscale**2 == pytest.approx(factor, rel=1e-6)
    cos, sin = rope_tables(scored.rope, WIDTH, 700, torch.float32, "cpu")
    expected_cos, expected_sin = embedding(torch.zeros(1), torch.arange(700)[None])
    torch.testing.assert_close(cos, expected_cos[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(sin, expected_sin[0], rtol=0, atol=1e-4)
