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

from spec_lab.checkpoints.config import ModelConfig, read_config_json
from spec_lab.checkpoints.gemma4_text import FULL, SLIDING, LayerRope, head_sizes, layer_rope
from spec_lab.checkpoints.json_input import ConfigFields, shown, shown_ids
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.core.errors import UserError

KNOB = "drafter.path"
ARCHITECTURE = "Gemma4AssistantForCausalLM"
# The only values that the forward code here supports; a missing key is accepted too.
PLAIN_TEXT_OPTIONS: Mapping[str, tuple[Any, ...]] = {
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
    config = read_config_json(folder, KNOB)
    source = str(folder / "config.json")
    fields = ConfigFields(config, source)
    text_fields = _text_fields(fields)
    pairs = {
        "backbone_hidden_size": (fields.integer("backbone_hidden_size"), target.hidden_size),
        "vocab_size": (text_fields.integer("vocab_size"), target.vocab_size),
    }
    for name, (ours, its) in pairs.items():
        if ours != its:
            raise _other_target(source, f"{name} is {ours}, the target has {its}")
    return AssistantConfig(
        target=target,
        hidden_size=text_fields.integer("hidden_size"),
        intermediate_size=text_fields.integer("intermediate_size"),
        num_heads=text_fields.integer("num_attention_heads"),
        rms_norm_eps=text_fields.epsilon("rms_norm_eps", 1e-6),
        layers=_layers(fields, text_fields, target),
        centroids=_centroids(fields, target.vocab_size) if fields.flag("use_ordered_embeddings") else None,
    )


def _text_fields(fields: ConfigFields) -> ConfigFields:
    """Return the decoder's part of the file; refuse options, in either part, that the forward code here lacks."""
    source = fields.source
    architectures = fields.texts("architectures")
    if ARCHITECTURE not in architectures:
        found = ", ".join(map(shown, architectures)) or "none named"
        raise UserError(f"{source}: architecture {found} is not supported; set {KNOB} to a {ARCHITECTURE}")
    if fields.values.get("quantization_config"):
        raise UserError(f"{source}: a quantized assistant is not supported; set {KNOB} to the bfloat16 checkpoint")
    if not fields.flag("tie_word_embeddings", True):
        raise UserError(
            f"{source}: tie_word_embeddings false is not supported; set {KNOB} to an assistant that ties them"
        )
    text = fields.object("text_config")
    if not text:
        raise UserError(f"{source}: text_config is missing; fetch the file again")
    for key, allowed in PLAIN_TEXT_OPTIONS.items():
        if text.get(key) is not None and text[key] not in allowed:
            raise UserError(
                f"{source}: {key} {shown(text[key])} is not supported; set {KNOB} to an assistant with {allowed[0]!r}"
            )
    return ConfigFields(text, f"{source} (text_config)")


def _layers(fields: ConfigFields, text: ConfigFields, target: AssistantTarget) -> tuple[AssistantLayerConfig, ...]:
    layer_types = text.texts("layer_types")
    num_layers = text.integer("num_hidden_layers")
    if len(layer_types) != num_layers or set(layer_types) - {FULL, SLIDING}:
        raise UserError(
            f"{text.source}: layer_types must have {num_layers} entries, each {FULL} or {SLIDING}, but is "
            f"[{shown_ids(layer_types)}]; fetch the file again"
        )
    sources = _kv_sources(fields, layer_types, target)
    return tuple(_layer(text, index, layer_types[index], sources[index], target) for index in range(num_layers))


def _layer(
    text: ConfigFields, index: int, layer_type: str, kv_source: int, target: AssistantTarget
) -> AssistantLayerConfig:
    """Return the layer, whose head sizes and rope must equal those of the target layer that it reads."""
    head_dim, num_kv_heads = head_sizes(text, index, layer_type)
    rope = layer_rope(text, layer_type, KNOB)
    read = target.layers[kv_source]
    pairs = {
        "head_dim": (head_dim, read.head_dim),
        "num_key_value_heads": (num_kv_heads, read.num_kv_heads),
        "the rope": (rope, read.rope),
    }
    for name, (ours, its) in pairs.items():
        if ours != its:
            difference = (
                f"{name} of layer {index} is {ours}, but that of target layer {kv_source}, which it reads, is {its}"
            )
            raise _other_target(text.source, difference)
    window = text.integer("sliding_window", 512) if layer_type == SLIDING else None
    return AssistantLayerConfig(head_dim, window, rope, kv_source)


def _kv_sources(fields: ConfigFields, layer_types: Sequence[str], target: AssistantTarget) -> Sequence[int]:
    """Return the target layer that each layer reads: the one in `kv_source_layers`, else the last of its type that owns
    its KV."""
    owners = [index for index, layer in enumerate(target.layers) if layer.owns_kv]
    named = fields.integers("kv_source_layers")
    if named is not None:
        if len(named) != len(layer_types) or any(i not in owners for i in named):
            raise UserError(
                f"{fields.source}: kv_source_layers must name, for each of {len(layer_types)} layers, a target layer "
                f"that owns its KV (of {len(target.layers)}), but is [{shown_ids(named)}]; set {KNOB} to an "
                "assistant for this target"
            )
        return named
    last = {target.layers[index].layer_type: index for index in owners}
    missing = [layer_type for layer_type in layer_types if layer_type not in last]
    if missing:
        raise _other_target(fields.source, f"it reads a {missing[0]} layer, but the target has none")
    return [last[layer_type] for layer_type in layer_types]


def _centroids(fields: ConfigFields, vocab_size: int) -> CentroidHeadConfig:
    centroids = CentroidHeadConfig(
        fields.integer("num_centroids", 2048), fields.integer("centroid_intermediate_top_k", 32)
    )
    if vocab_size % centroids.num_centroids or centroids.top_k > centroids.num_centroids:
        raise UserError(
            f"{fields.source}: num_centroids {centroids.num_centroids} must divide the vocabulary of {vocab_size} and "
            f"be at least centroid_intermediate_top_k {centroids.top_k}; fetch the file again"
        )
    return centroids


def _other_target(source: str, difference: str) -> UserError:
    return UserError(
        f"{source}: an assistant for another target ({difference}); set {KNOB} to one trained for this target"
    )
