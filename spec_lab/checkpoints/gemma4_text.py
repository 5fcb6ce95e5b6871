"""Reads the layers in config.json of a Gemma 4 decoder, which may be a target or an assistant.

The layers' sizes are read in two spellings: `global_head_dim` and `num_global_key_value_heads` of the files on the hub,
and `per_layer_config`, which transformers writes since 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spec_lab.checkpoints.checks import refuse_values
from spec_lab.checkpoints.json_input import ConfigFields
from spec_lab.checkpoints.plan import RopeConfig

FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_ROPE: Mapping[str, Mapping[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}


@dataclass(frozen=True, slots=True)
class LayerRope:
    """Rotary embedding of a layer's queries or keys.

    Attributes:
        rotated_fraction: fraction of the channel pairs that are rotated, the first ones (Gemma's "proportional").
        scaling: how frequencies are scaled, by the names of `RopeConfig`.
    """

    theta: float
    rotated_fraction: float = 1.0
    scaling: str = "none"

    @property
    def config(self) -> RopeConfig:
        """Return it as a `RopeConfig`, from which tables are made. `scaling`, which only other families have, is left
        out."""
        if self.rotated_fraction == 1.0:
            return RopeConfig(self.theta, "none")
        return RopeConfig(self.theta, "proportional", partial_rotary_factor=self.rotated_fraction)

    def __str__(self) -> str:
        return f"theta {self.theta:g}, rotated fraction {self.rotated_fraction:g}, scaling {self.scaling}"


def head_sizes(text: ConfigFields, index: int, layer_type: str) -> tuple[int, int]:
    """Return head_dim and number of KV heads of a layer, with transformers' defaults for missing keys."""
    head_dim = text.integer("head_dim", 256)
    num_kv_heads = text.integer("num_key_value_heads", 4)
    per_layer = ConfigFields(text.object("per_layer_config"), f"{text.source} (per_layer_config)")
    if text.has("per_layer_config"):
        layer = ConfigFields(per_layer.object(str(index)), per_layer.source)
        return layer.integer("head_dim", head_dim), layer.integer("num_key_value_heads", num_kv_heads)
    if layer_type == FULL:
        head_dim = text.integer("global_head_dim", 512)
        if text.flag("attention_k_eq_v"):
            num_kv_heads = text.integer("num_global_key_value_heads", num_kv_heads)
    return head_dim, num_kv_heads


def layer_rope(text: ConfigFields, layer_type: str) -> LayerRope:
    """Return the rotary embedding of the layers of one type."""
    by_type = ConfigFields(text.object("rope_parameters") or DEFAULT_ROPE, f"{text.source} (rope_parameters)")
    fields = ConfigFields(by_type.object(layer_type), f"{text.source} (rope_parameters.{layer_type})")
    refuse_values(fields.source, fields.values, {"rope_type": ("default", "proportional"), "factor": (1.0,)})
    is_proportional = fields.text("rope_type", "default") == "proportional"
    return LayerRope(
        fields.number("rope_theta"), fields.number("partial_rotary_factor", 1.0) if is_proportional else 1.0
    )
