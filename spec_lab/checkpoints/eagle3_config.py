"""Reading the config.json of EAGLE-3 draft heads: SafeAILab's layout, which vLLM and SGLang read too, and that of
vLLM's speculators.

EAGLE-3: Li et al. 2025, arXiv 2503.01840. A head's layer has grouped-query attention, or latent attention (MLA, as the
heads for Kimi-K2.5).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from spec_lab.checkpoints.config import MAX_LAYERS, ModelConfig, read_config_json
from spec_lab.checkpoints.families.table import read_decoder
from spec_lab.checkpoints.json_input import ConfigFields, shown, shown_ids
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.core.errors import UserError

logger = logging.getLogger(__name__)

KNOB = "drafter.path"
LAYER_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
LATENT_ARCHITECTURE = "DeepseekV3ForCausalLM"
# With these keys all layers of a head have dense MLPs. Its config.json may repeat the target's keys for experts (NVIDIA
# ModelOpt).
DENSE_LAYER: Mapping[str, Any] = {"first_k_dense_replace": MAX_LAYERS, "mlp_layer_types": None, "moe_layer_freq": 1}
HeadKind = Literal["eagle3", "peagle"]
A_HEAD: Mapping[HeadKind, str] = {"eagle3": "an eagle3 head", "peagle": "a peagle head of speculators"}
NUM_TAPS = 3
OTHER_DRAFTER = "choose another drafter, such as drafter=ngram"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """An EAGLE-3 head of one layer, or a P-EAGLE head of one or more.

    Attributes:
        layer: the first layer as a decoder of one layer, with its own rope; its `max_position_embeddings` is at least
            the target's.
        tap_layer_inputs: the target's layers whose inputs the head reads, ascending; None means
            `default_tap_layer_inputs` of the target.
        norm_before_residual: whether the layer's residual is the normed feature rather than the raw output of `fc`.
        norm_before_fc: one norm over the concatenated taps (EAGLE-3.1).
        fc_norm: a norm for each tap (EAGLE-3.1); never together with `norm_before_fc`.
        norm_output: whether later steps read the output after the final norm rather than before it (EAGLE-3.1).
        more_layers: plain layers after the first one (P-EAGLE).
        mask_token_id: the token of the mask rows, which predict drafts (P-EAGLE); None without mask rows (EAGLE-3).
    """

    layer: ModelConfig
    target_hidden_size: int
    draft_vocab_size: int
    target_vocab_size: int
    tap_layer_inputs: tuple[int, int, int] | None
    norm_before_residual: bool
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    more_layers: tuple[LayerPlan, ...] = ()
    mask_token_id: int | None = None


def default_tap_layer_inputs(num_layers: int, remedy: str = OTHER_DRAFTER) -> tuple[int, int, int]:
    """Return the layers whose inputs EAGLE-3 heads read unless their config says otherwise.

    `remedy` is what a user can do about a target that has too few.

    Raises:
        UserError: a target with fewer than 7 layers, where the three are not ascending.
    """
    taps = (2, num_layers // 2, num_layers - 3)
    if not taps[0] < taps[1] < taps[2]:
        raise UserError(
            f"an EAGLE-3 head reads three layers, for which a target of {num_layers} layers is too shallow; {remedy}"
        )
    return taps


def read_eagle3_config(folder: Path, target: ModelConfig, kind: HeadKind = "eagle3") -> Eagle3Config:
    """Read a head's config.json and check that the head belongs to the target and has the expected kind.

    Raises:
        UserError: another kind of head, an option that is not supported, or a head for another target.
    """
    config = read_config_json(folder, KNOB)
    source = str(folder / "config.json")
    if "medusa_num_heads" in config:
        raise UserError(f"{source}: this is a Medusa checkpoint, which no drafter here reads")
    top_level = ConfigFields(config, source)
    eagle = ConfigFields(top_level.object("eagle_config"), f"{source} (eagle_config)")
    layers = _layer_config(top_level, eagle, kind)
    layer = replace(layers, layers=layers.layers[:1])
    # NVIDIA's heads have norm_before_fc in `eagle_config` (vLLM #42143). A key at the top level overrides it.
    named = {key: value for key, value in config.items() if value is not None}
    fields = ConfigFields({**eagle.values, **named}, source)
    if "speculators_model_type" in config and config.get("norm_before_residual") is None:
        raise UserError(
            f"{source}: norm_before_residual is missing, and the defaults of speculators differ (class false, training "
            "command true); add it as the head was trained"
        )
    head = Eagle3Config(
        layer=replace(
            layer, max_position_embeddings=max(layer.max_position_embeddings, target.max_position_embeddings)
        ),
        target_hidden_size=fields.integer("target_hidden_size", layer.hidden_size),
        draft_vocab_size=fields.integer("draft_vocab_size", layer.vocab_size),
        target_vocab_size=layer.vocab_size,
        tap_layer_inputs=_tap_layer_inputs(top_level, eagle, target.num_layers),
        norm_before_residual=fields.flag("norm_before_residual"),
        norm_before_fc=fields.flag("norm_before_fc"),
        fc_norm=fields.flag("fc_norm"),
        norm_output=fields.flag("norm_output"),
        more_layers=layers.layers[1:],
        mask_token_id=None if kind == "eagle3" else fields.integer("mask_token_id", least=0, most=layer.vocab_size - 1),
    )
    if head.norm_before_fc and head.fc_norm:
        raise UserError(
            f"{source}: norm_before_fc and fc_norm are two norms at one place; set to true only the one that the head "
            f"of {KNOB} was trained with"
        )
    _refuse_other_target(head, target, source)
    return head


def _layer_config(config: ConfigFields, eagle: ConfigFields, wanted: HeadKind) -> ModelConfig:
    """Read the layers of the head as a decoder of their family; an EAGLE-3 head has one layer."""
    source = config.source
    is_speculators = "speculators_model_type" in config.values
    kind = config.text("speculators_model_type", "eagle3")
    if kind != wanted:
        raise UserError(
            f"{source}: speculators_model_type {shown(kind)} is not supported; set {KNOB} to {A_HEAD[wanted]}"
        )
    if not eagle.flag("use_aux_hidden_state", True):
        raise UserError(f"{source}: use_aux_hidden_state is false, so this is not an EAGLE-3 head; set {KNOB} to one")
    if is_speculators and not config.object("transformer_layer_config"):
        raise UserError(
            f"{source}: transformer_layer_config is missing; {KNOB} must name a whole speculators checkpoint"
        )
    layer = ConfigFields(config.object("transformer_layer_config") if is_speculators else config.values, source)
    architecture = _layer_architecture(layer)
    num_layers = layer.integer("num_hidden_layers", 1, most=MAX_LAYERS)
    if num_layers != 1 and wanted == "eagle3":
        raise UserError(
            f"{source}: {num_layers} layers, so this is not an EAGLE-3 head, which has one layer; set {KNOB} to one, "
            "or choose the drafter of this folder"
        )
    decoder = {**layer.values, **DENSE_LAYER, "architectures": [architecture], "num_hidden_layers": num_layers}
    layers = read_decoder(decoder, source)
    if any(plan.window is not None for plan in layers.layers):
        raise UserError(f"{source}: a head with a sliding window is not supported; set {KNOB} to a full-attention head")
    return layers


def _layer_architecture(layer: ConfigFields) -> str:
    """Choose the family that reads the head's layer: a latent one if it has latent attention, else the one it names."""
    if layer.has("kv_lora_rank"):
        if layer.flag("mla_use_nope"):
            raise UserError(f"{layer.source}: latent attention without rotation (mla_use_nope) is not supported")
        return LATENT_ARCHITECTURE
    family = layer.text("model_type", "llama")
    if family not in LAYER_ARCHITECTURES:
        raise UserError(
            f"{layer.source}: a head of model_type {shown(family)} is not supported; supported are "
            f"{', '.join(LAYER_ARCHITECTURES)}, and latent attention (MLA) of any name, which has a kv_lora_rank"
        )
    return LAYER_ARCHITECTURES[family]


def _refuse_other_target(head: Eagle3Config, target: ModelConfig, source: str) -> None:
    pairs = {
        "target_hidden_size": (head.target_hidden_size, target.hidden_size),
        "vocab_size": (head.target_vocab_size, target.vocab_size),
    }
    differing = [f"{name} is {ours}, the target has {its}" for name, (ours, its) in pairs.items() if ours != its]
    if differing:
        raise UserError(
            f"{source}: this head was trained for another target ({'; '.join(differing)}); set {KNOB} to a head "
            "trained for this target"
        )
    if head.draft_vocab_size > head.target_vocab_size:
        raise UserError(
            f"{source}: draft_vocab_size {head.draft_vocab_size} exceeds the vocab_size of {head.target_vocab_size}; "
            f"set {KNOB} to a head trained for this target"
        )


def _tap_layer_inputs(config: ConfigFields, eagle: ConfigFields, num_layers: int) -> tuple[int, int, int] | None:
    """Return the tapped layers in the sense "input of layer k"; None if the config names none.

    The same key has two meanings: SGLang reads it inside `eagle_config` only, as the output of layer k; vLLM reads it
    at the top level only, as the input of layer k.
    """
    source = config.source
    nested, top_level = eagle.integers(LAYER_IDS), config.integers(LAYER_IDS)
    from_nested = _checked_taps(nested, 1, num_layers, source) if nested else None
    from_top_level = _checked_taps(top_level, 0, num_layers, source) if top_level else None
    if from_nested and from_top_level and from_nested != from_top_level:
        logger.warning(
            "%s: %s means the inputs of layers %s inside eagle_config (SGLang: outputs) but %s at the top level "
            "(vLLM: inputs); the former are used; the acceptance length should confirm this",
            source,
            LAYER_IDS,
            from_nested,
            from_top_level,
        )
    return from_nested or from_top_level


def _checked_taps(layer_ids: Sequence[int], offset: int, num_layers: int, source: str) -> tuple[int, int, int]:
    taps = sorted(layer + offset for layer in layer_ids)
    if len(set(taps)) != NUM_TAPS:
        raise UserError(
            f"{source}: {LAYER_IDS} is [{shown_ids(layer_ids)}]; heads that read three layers are supported"
        )
    if taps[-1] == num_layers:
        raise UserError(f"{source}: {LAYER_IDS} names the output of the target's last layer, which cannot be tapped")
    if taps[0] < 0 or taps[-1] > num_layers:
        raise UserError(
            f"{source}: {LAYER_IDS} is [{shown_ids(layer_ids)}], but the target has {num_layers} layers; set {KNOB} to "
            "a head trained for this target"
        )
    return taps[0], taps[1], taps[2]
