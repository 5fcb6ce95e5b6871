"""The rotary embedding of a config.json, from transformers' `rope_parameters`.

YaRN (Peng et al. 2023, arXiv 2309.00071) has two corrections, in two places. The rotary tables are multiplied by a
factor of the scaling, or, where config.json has both `mscale` and `mscale_all_dim` (DeepSeek), by the ratio of two. The
attention scores of DeepSeek's families are multiplied by the square of the second, which is not 1 (`score_factor`). A
common mistake is to leave this square out, or to move it into the tables (huggingface/transformers #47435).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from spec_lab.checkpoints.json_input import refuse_values
from spec_lab.checkpoints.plan import RopeConfig

KINDS = ("default", "linear", "dynamic", "llama3", "proportional", "yarn", "longrope")


def read_rope(keys: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Read the rotary embedding of a layer. `max_positions` is the file's `max_position_embeddings`."""
    kind, original = keys["rope_type"], keys.get("original_max_position_embeddings") or max_positions
    refuse_values("config.json", {"rope_type": kind}, {"rope_type": KINDS})
    factor = keys.get("factor") or (max_positions / original if kind in ("yarn", "longrope") else 1.0)
    options: dict[str, Any] = {}
    if kind in ("dynamic", "llama3", "yarn", "longrope"):
        options["original_max_position_embeddings"] = max_positions if kind == "dynamic" else original
    if kind == "llama3":
        options |= {key: keys[key] for key in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        weight, of_scores = keys.get("mscale"), keys.get("mscale_all_dim")
        both = _mscale(factor, weight) / _mscale(factor, of_scores) if weight and of_scores else _mscale(factor, 1.0)
        options["amplitude"] = keys.get("attention_factor") or both
        options |= {key: float(keys.get(key) or usual) for key, usual in (("beta_fast", 32), ("beta_slow", 1))}
        options["whole_channels"] = keys.get("truncate", True)
    if kind == "longrope":  # Phi-3's (arXiv 2402.13753)
        amplitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        options["amplitude"] = keys.get("attention_factor") or amplitude
        options |= {f"{length}_divisors": tuple(map(float, keys[f"{length}_factor"])) for length in ("short", "long")}
    return RopeConfig(
        theta=float(keys["rope_theta"]),
        scaling="none" if kind == "default" else kind,
        factor=1.0 if kind == "longrope" else float(factor),
        partial_rotary_factor=keys.get("partial_rotary_factor") or 1.0,
        **options,
    )


def num_positions(rope: RopeConfig, max_positions: int) -> int:
    """Return how many positions a model has whose file says `max_positions`, which may be those before the scaling."""
    if rope.scaling not in ("yarn", "dynamic"):
        return max_positions
    return max(max_positions, int(rope.factor * rope.original_max_position_embeddings))


def score_factor(keys: Mapping[str, Any]) -> float:
    """Return DeepSeek's correction: attention scores are multiplied by its square."""
    return _mscale(keys["factor"], keys.get("mscale_all_dim") or 0.0) if keys["rope_type"] == "yarn" else 1.0


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
