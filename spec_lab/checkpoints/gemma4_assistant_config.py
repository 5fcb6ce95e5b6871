"""Reads the config.json of a Gemma 4 assistant (`Gemma4AssistantForCausalLM`).

The layers' sizes are read as a target's are (`gemma4_text`). Each layer reads the keys and values of a target layer. A
top-level key of our own, `kv_source_layers`, names these target layers. Without the key, a layer reads the target's
last layer of the same type that owns its KV, as in SGLang (#24436) and vLLM (#41745).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_lab.checkpoints.checks import refuse_other_target, refuse_values
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.gemma4_text import FULL, SLIDING, LayerRope, head_sizes, layer_rope
from spec_lab.checkpoints.json_input import ConfigFields, read_json
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.core.errors import UserError

KNOB = "drafter.path"
ARCHITECTURE = "Gemma4AssistantForCausalLM"
# The only values that the forward code here supports; a missing key is accepted too.
PLAIN_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "architecture": (ARCHITECTURE,),
    "tie_word_embeddings": (True,),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "enable_moe_block": (False,),
    "use_double_wide_mlp": (False,),
    "hidden_size_per_layer_input": (0,),
    "use_bidirectional_attention": ("vision",),
}


@dataclass(frozen=True, slots=True)
class TargetLayerKV:
    """Keys and values of one target layer. `owns_kv` is False if it reads those of another layer, or has none."""

    is_sliding: bool
    num_kv_heads: int
    head_dim: int
    rope: LayerRope
    owns_kv: bool = True

    @classmethod
    def from_plan(cls, plan: LayerPlan) -> TargetLayerKV:
        """Describe the keys and values of a layer of any target."""
        partial = plan.rope.partial_rotary_factor
        if plan.rope.scaling == "proportional":
            rope = LayerRope(plan.rope.theta, partial)
        else:
            # Other families count the exponents within the rotated channels; Gemma counts within the whole head.
            scaling = plan.rope.scaling if partial == 1.0 else f"of the first {partial:g} of the channels"
            rope = LayerRope(plan.rope.theta, scaling=scaling)
        return cls(
            plan.window is not None,
            plan.num_kv_heads,
            plan.head_dim,
            rope,
            plan.kv_owner is None and plan.delta_net is None,
        )

    @property
    def layer_type(self) -> str:
        return SLIDING if self.is_sliding else FULL


@dataclass(frozen=True, slots=True)
class AssistantTarget:
    """The facts that an assistant needs about the target whose KV it reads.

    Attributes:
        embedding_scale: factor of the target's embeddings: sqrt(hidden_size) in Gemma, 1 in other families.
    """

    hidden_size: int
    vocab_size: int
    embedding_scale: float
    layers: tuple[TargetLayerKV, ...]

    @classmethod
    def from_model_config(cls, config: ModelConfig) -> AssistantTarget:
        """Describe any target that caches keys and values.

        Raises:
            UserError: the target caches the rows of latent attention.
        """
        if any(plan.latent is not None for plan in config.layers):
            raise UserError(
                "drafter=frozen_kv reads the target's keys and values, but this target caches the rows of latent "
                "attention (MLA); use another drafter"
            )
        scale = 1.0 if config.gemma4 is None else config.gemma4.embedding_scale
        return cls(config.hidden_size, config.vocab_size, scale, tuple(map(TargetLayerKV.from_plan, config.layers)))


@dataclass(frozen=True, slots=True)
class AssistantLayerConfig:
    """One layer. `window` is the number of newest keys that it sees, None for all; `kv_source` is the target layer
    whose KV it reads."""

    head_dim: int
    window: int | None
    rope: LayerRope
    kv_source: int


@dataclass(frozen=True, slots=True)
class CentroidHeadConfig:
    """A head that scores few tokens. The vocabulary is divided into `num_centroids` equal clusters, and only the tokens
    of the `top_k` likeliest clusters are scored."""

    num_centroids: int
    top_k: int


@dataclass(frozen=True, slots=True)
class AssistantConfig:
    """A Gemma 4 assistant and the target it belongs to; `centroids` is None if the head is dense."""

    target: AssistantTarget
    hidden_size: int
    intermediate_size: int
    num_heads: int
    rms_norm_eps: float
    layers: tuple[AssistantLayerConfig, ...]
    centroids: CentroidHeadConfig | None


def read_assistant_config(folder: Path, target: AssistantTarget) -> AssistantConfig:
    """Read an assistant's config.json and check that it belongs to the target.

    Raises:
        UserError: another architecture, an option that is not supported, or an assistant for another target.
    """
    source = str(folder / "config.json")
    fields = ConfigFields(read_json(folder / "config.json"), source)
    text_fields = _text_fields(fields)
    pairs = {
        "backbone_hidden_size": (fields.integer("backbone_hidden_size"), target.hidden_size),
        "vocab_size": (text_fields.integer("vocab_size"), target.vocab_size),
    }
    refuse_other_target(source, KNOB, pairs)
    return AssistantConfig(
        target=target,
        hidden_size=text_fields.integer("hidden_size"),
        intermediate_size=text_fields.integer("intermediate_size"),
        num_heads=text_fields.integer("num_attention_heads"),
        rms_norm_eps=text_fields.number("rms_norm_eps", 1e-6),
        layers=_layers(fields, text_fields, target),
        centroids=_centroids(fields) if fields.flag("use_ordered_embeddings") else None,
    )


def _text_fields(fields: ConfigFields) -> ConfigFields:
    """Return the decoder's part of the file; refuse options, in either part, that the forward code here lacks."""
    source, text = fields.source, fields.object("text_config")
    values = {**text, **fields.values, "architecture": ", ".join(fields.texts("architectures"))}
    refuse_values(source, values, PLAIN_OPTIONS)
    return ConfigFields(text, f"{source} (text_config)")


def _layers(fields: ConfigFields, text: ConfigFields, target: AssistantTarget) -> tuple[AssistantLayerConfig, ...]:
    types = text.texts("layer_types")
    sources = _kv_sources(fields, types, target)
    return tuple(_layer(text, index, types[index], sources[index], target) for index in range(len(types)))


def _layer(
    text: ConfigFields, index: int, layer_type: str, kv_source: int, target: AssistantTarget
) -> AssistantLayerConfig:
    """Return the layer, whose head sizes and rope must equal those of the target layer that it reads."""
    head_dim, num_kv_heads = head_sizes(text, index, layer_type)
    rope = layer_rope(text, layer_type)
    read = target.layers[kv_source]
    pairs = {
        f"head_dim of layer {index}": (head_dim, read.head_dim),
        f"num_key_value_heads of layer {index}": (num_kv_heads, read.num_kv_heads),
        f"the rope of layer {index}": (str(rope), str(read.rope)),
    }
    refuse_other_target(text.source, KNOB, pairs)
    window = text.integer("sliding_window", 512) if layer_type == SLIDING else None
    return AssistantLayerConfig(head_dim, window, rope, kv_source)


def _kv_sources(fields: ConfigFields, types: Sequence[str], target: AssistantTarget) -> Sequence[int]:
    """Return the target layer that each layer reads: the one in `kv_source_layers`, else the last of its type that owns
    its KV."""
    owners = [index for index, layer in enumerate(target.layers) if layer.owns_kv]
    named = fields.integers("kv_source_layers")
    if named is not None:
        found = tuple(layer for layer in named if layer in owners)
        refuse_other_target(fields.source, KNOB, {"kv_source_layers": (named, found)})
        return named
    last = {target.layers[index].layer_type: index for index in owners}
    refuse_other_target(fields.source, KNOB, {"kind of layers": (set(types), set(types) & last.keys())})
    return [last[layer_type] for layer_type in types]


def _centroids(fields: ConfigFields) -> CentroidHeadConfig:
    return CentroidHeadConfig(fields.integer("num_centroids", 2048), fields.integer("centroid_intermediate_top_k", 32))
