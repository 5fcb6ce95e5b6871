"""YaRN as DeepSeek's configs have it (Peng et al. 2023, arXiv 2309.00071): two corrections, in two places.

The rotary tables are multiplied by the ratio of two factors, of `mscale` and of `mscale_all_dim`, if config.json has
both. The ratio is 1 for the published weights of these families. The attention scores are multiplied by the square of
the second factor, which is not 1. A common mistake is to leave this square out, or to move it into the tables
(huggingface/transformers #47435).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spec_lab.checkpoints.families.plain import read_rope, rope_fields
from spec_lab.checkpoints.json_input import ConfigFields
from spec_lab.checkpoints.plan import RopeConfig
from spec_lab.core.errors import UserError


@dataclass(frozen=True, slots=True)
class ScoredRope:
    """A rotary embedding, and YaRN's correction: attention scores are multiplied by its square."""

    rope: RopeConfig
    mscale: float = 1.0


def read_rope_or_yarn(config: ConfigFields, max_positions: int) -> ScoredRope:
    """Read the rotary embedding, which all layers share, in either spelling."""
    fields = rope_fields(config)
    if fields.values.get("rope_type") != "yarn":
        return ScoredRope(read_rope(config, max_positions))
    theta = fields.number("rope_theta", 10000.0)
    if theta <= 1:
        raise UserError(f"{fields.source}: rope_theta must be more than 1 for rope type yarn, but is {theta:g}")
    original = fields.integer("original_max_position_embeddings", max_positions)
    factor = fields.number("factor", max_positions / original)
    rope = RopeConfig(
        theta=theta,
        scaling="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        whole_channels=fields.flag("truncate", True),
        amplitude=_amplitude(fields, factor),
    )
    return ScoredRope(rope, _mscale(factor, _weight(fields, "mscale_all_dim")))


def _amplitude(fields: ConfigFields, factor: float) -> float:
    """Return the factor of cosines and sines."""
    if fields.has("attention_factor"):
        return fields.number("attention_factor")
    mscale, of_scores = _weight(fields, "mscale"), _weight(fields, "mscale_all_dim")
    return _mscale(factor, mscale) / _mscale(factor, of_scores) if mscale and of_scores else _mscale(factor, 1.0)


def _weight(fields: ConfigFields, key: str) -> float:
    """Read a weight, which may be 0; a missing key is 0."""
    return fields.number(key) if fields.values.get(key) else 0.0


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
