"""Reads the rotary embedding of a config.json, in the spellings of the hub and of transformers 5.

YaRN (Peng et al. 2023, arXiv 2309.00071) has two corrections, in two places. The rotary tables are multiplied by a
factor of the scaling, or, where config.json has both `mscale` and `mscale_all_dim` (DeepSeek), by the ratio of two. The
attention scores of DeepSeek's families are multiplied by the square of the second, which is not 1 (`score_factor`). A
common mistake is to leave this square out, or to move it into the tables (huggingface/transformers #47435).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from spec_lab.checkpoints.checks import refuse_values
from spec_lab.checkpoints.json_input import ConfigFields
from spec_lab.checkpoints.plan import RopeConfig
from spec_lab.core.errors import UserError

ORIGINAL = "original_max_position_embeddings"
KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def rope_fields(config: ConfigFields) -> ConfigFields:
    """Collect the keys of the only rotary embedding from all places where a config may have them.

    Raises:
        UserError: the keys are separate for each type of layer, or two places contradict each other; transformers
            silently uses one of them.
    """
    said: dict[str, Any] = {}
    top_level = {"rope_theta": config.values.get("rope_theta")}
    for place in (config.object("rope_parameters"), config.object("rope_scaling"), top_level):
        # transformers reads such parameters for no family here: Llama skips them, the Qwen families fail.
        keyed = [key for key, value in place.items() if isinstance(value, dict)]
        refuse_values(f"{config.source} (rope)", place, dict.fromkeys(keyed, ()))
        for key, value in place.items():
            name = "rope_type" if key == "type" else key
            if value is not None and said.setdefault(name, value) != value:
                raise UserError(
                    f"{config.source}: {name} is {said[name]!r} in one place and {value!r} in another; "
                    "remove the one that the model was not trained with"
                )
    # transformers also writes a family's default outside the parameters, even if they differ. It reads the parameters.
    if (part := config.values.get("partial_rotary_factor")) is not None:
        said.setdefault("partial_rotary_factor", part)
    if (original := config.values.get(ORIGINAL)) is not None:  # it precedes the one among the parameters
        said[ORIGINAL] = original
    return ConfigFields(said, f"{config.source} (rope)")


def read_rope(config: ConfigFields, max_positions: int, default_part: float = 1.0) -> RopeConfig:
    """Read the rotary embedding, which all layers share.

    Args:
        max_positions: the file's `max_position_embeddings`.
        default_part: the fraction of a head's channels that are rotated if the file does not say.
    """
    fields = rope_fields(config)
    kind = fields.text("rope_type", "default")
    plain = RopeConfig(
        theta=fields.number("rope_theta", 10000.0),
        scaling="none",
        partial_rotary_factor=fields.number("partial_rotary_factor", default_part),
    )
    original = fields.integer(ORIGINAL, max_positions)
    match kind:
        case "default":
            return plain
        case "linear":
            return replace(plain, scaling="linear", factor=fields.number("factor"))
        case "dynamic":
            factor = fields.number("factor")
            return replace(plain, scaling="dynamic", factor=factor, original_max_position_embeddings=max_positions)
        case "llama3":
            return replace(
                plain,
                scaling="llama3",
                factor=fields.number("factor"),
                low_freq_factor=fields.number("low_freq_factor"),
                high_freq_factor=fields.number("high_freq_factor"),
                original_max_position_embeddings=original,
            )
        case "yarn":
            return _yarn(fields, plain, original, max_positions)
        case "longrope":
            return _longrope(fields, plain, original, max_positions)
    refuse_values(config.source, {"rope type": kind}, {"rope type": KINDS})
    raise AssertionError("each kind is read above")


def num_positions(rope: RopeConfig, max_positions: int) -> int:
    """Return how many positions a model has whose file says `max_positions`, which may be those before the scaling."""
    if rope.scaling not in ("yarn", "dynamic"):
        return max_positions
    return max(max_positions, int(rope.factor * rope.original_max_position_embeddings))


def score_factor(config: ConfigFields, rope: RopeConfig) -> float:
    """Return DeepSeek's correction: attention scores are multiplied by its square."""
    weight = _weight(rope_fields(config), "mscale_all_dim")
    return _mscale(rope.factor, weight) if rope.scaling == "yarn" else 1.0


def _yarn(fields: ConfigFields, plain: RopeConfig, original: int, max_positions: int) -> RopeConfig:
    factor = fields.number("factor", max_positions / original)
    mscale, of_scores = _weight(fields, "mscale"), _weight(fields, "mscale_all_dim")
    amplitude = _mscale(factor, mscale) / _mscale(factor, of_scores) if mscale and of_scores else _mscale(factor, 1.0)
    return replace(
        plain,
        scaling="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        whole_channels=fields.flag("truncate", True),
        amplitude=fields.number("attention_factor", amplitude),
    )


def _longrope(fields: ConfigFields, plain: RopeConfig, original: int, max_positions: int) -> RopeConfig:
    """Read Phi-3's scaling (LongRoPE, arXiv 2402.13753)."""
    factor = fields.number("factor", max_positions / original)
    amplitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short, long = (tuple(map(float, fields.values[f"{name}_factor"])) for name in ("short", "long"))
    return replace(
        plain,
        scaling="longrope",
        original_max_position_embeddings=original,
        short_divisors=short,
        long_divisors=long,
        amplitude=fields.number("attention_factor", amplitude),
    )


def _weight(fields: ConfigFields, key: str) -> float:
    """Read a weight, which may be 0; a missing key is 0."""
    return fields.number(key) if fields.values.get(key) else 0.0


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
