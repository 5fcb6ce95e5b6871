"""Reading EAGLE-3 draft heads: SafeAILab's layout, which vLLM and SGLang read too, and that of vLLM's speculators.

A head's layer has grouped-query attention, or latent attention (MLA, as the heads for Kimi-K2.5), whose products into
`q_lora_rank` and into the cache row then read both normed inputs, twice the width.

EAGLE-3: Li et al. 2025, arXiv 2503.01840. Whatever the layout, tensors come back under SafeAILab's names (`fc.weight`,
`midlayer.*`, `norm.weight`, `lm_head.weight`, `d2t`, `t2d`, `embed_tokens.weight`), those of EAGLE-3.1 under the
speculators' (`input_norm.weight`, `fc_norm.{0,1,2}.weight`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spec_lab.errors import UserError
from spec_lab.models.checkpoint import check_floating, check_tensors, read_tensors, stored_tensors
from spec_lab.models.checkpoint_files import StoredTensor
from spec_lab.models.config import ModelConfig, read_config_json
from spec_lab.models.families.table import read_decoder
from spec_lab.models.json_input import ConfigFields, shown, shown_ids
from spec_lab.models.tensor_shapes import layer_tensor_shapes

logger = logging.getLogger(__name__)

KNOB = "drafter.path"
LAYER_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
LATENT_ARCHITECTURE = "DeepseekV3ForCausalLM"
# Such heads have a dense MLP, though their config.json may repeat what their target says of experts (NVIDIA ModelOpt).
DENSE_LAYER: Mapping[str, Any] = {"first_k_dense_replace": 1, "mlp_layer_types": None, "moe_layer_freq": 1}
NUM_TAPS = 3
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """An EAGLE-3 head of one layer.

    Attributes:
        layer: the decoder of one layer that the head is, with a rope of its own; its `max_position_embeddings` are
            raised to the target's.
        tap_layer_inputs: the target's layers whose inputs the head reads, ascending; None means
            `default_tap_layer_inputs` of the target.
        norm_before_residual: the layer's residual is the normed feature, not the raw output of `fc`.
        norm_before_fc: one norm over the concatenated taps (EAGLE-3.1).
        fc_norm: a norm for each tap (EAGLE-3.1); never together with `norm_before_fc`.
        norm_output: later steps are fed the output after the final norm, not before (EAGLE-3.1).
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


def default_tap_layer_inputs(num_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs EAGLE-3 heads read unless their config says otherwise.

    Raises:
        UserError: a target with fewer than 7 layers, where two of the three coincide.
    """
    taps = (2, num_layers // 2, num_layers - 3)
    if not taps[0] < taps[1] < taps[2]:
        raise UserError(
            f"drafter=eagle3 reads the inputs of three layers; a target of {num_layers} layers is too shallow"
        )
    return taps


def read_eagle3_config(folder: Path, target: ModelConfig) -> Eagle3Config:
    """Read a head's config.json and check that the head belongs to the target.

    Raises:
        UserError: another kind of head, an option that is not supported, or a head for another target.
    """
    config = read_config_json(folder, KNOB)
    source = str(folder / "config.json")
    top_level = ConfigFields(config, source)
    eagle = ConfigFields(top_level.object("eagle_config"), f"{source} (eagle_config)")
    layer = _layer_config(top_level, eagle)
    # The top level, then `eagle_config`, where NVIDIA's heads have norm_before_fc (vLLM #42143).
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
    )
    if head.norm_before_fc and head.fc_norm:
        raise UserError(
            f"{source}: norm_before_fc and fc_norm are two norms for one place; set to true the one that the head of "
            f"{KNOB} was trained with"
        )
    _refuse_other_target(head, target, source)
    return head


def load_eagle3(
    folder: Path, target: ModelConfig, dtype: torch.dtype, device: torch.device | str
) -> tuple[Eagle3Config, dict[str, torch.Tensor]]:
    """Read a head for a target: its config, and its tensors under SafeAILab's names.

    Weights are cast to `dtype`. `d2t` is [draft_vocab_size] int64, the offset from draft id to target id; `t2d` is
    [target_vocab_size] bool. Left out where the file has none: `embed_tokens.weight` and, without a draft vocabulary,
    `lm_head.weight` (the target's serve instead), `d2t` (draft ids are target ids) and `t2d`.

    Raises:
        UserError: what `read_eagle3_config` refuses; tensors missing, of another shape or not expected; a vocabulary
            map that is out of range or contradicts itself.
    """
    config = read_eagle3_config(folder, target)
    stored = _canonical_names(stored_tensors(folder), str(folder))
    maps: dict[str, StoredTensor] = {name: stored.pop(name) for name in ("d2t", "t2d") if name in stored}
    wanted = eagle3_tensor_shapes(config)
    optional = _optional_tensors(config, target)
    check_tensors(stored, wanted, optional, str(folder))
    check_floating(stored, str(folder))
    tensors = read_tensors({name: stored[name] for name in wanted if name in stored}, dtype, device)
    vocabulary = _checked_vocabulary(read_tensors(maps, dtype, "cpu"), config, str(folder))
    return config, tensors | {name: tensor.to(device) for name, tensor in vocabulary.items()}


def eagle3_tensor_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a head's weights; the vocabulary maps are not among them."""
    hidden = config.layer.hidden_size
    layer = layer_tensor_shapes(config.layer.only_layer, hidden, attention_input_size=2 * hidden)
    return {
        **_tap_norm_shapes(config),
        "fc.weight": (hidden, NUM_TAPS * config.target_hidden_size),
        "midlayer.hidden_norm.weight": (hidden,),
        **{f"midlayer.{name}": shape for name, shape in layer.items()},
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
        "embed_tokens.weight": (config.target_vocab_size, hidden),
    }


def _optional_tensors(config: Eagle3Config, target: ModelConfig) -> set[str]:
    """Weights that the target's can stand in for."""
    if config.layer.hidden_size != target.hidden_size:
        return set()
    whole_vocabulary = config.draft_vocab_size == config.target_vocab_size
    return {"embed_tokens.weight"} | ({"lm_head.weight"} if whole_vocabulary else set())


def _tap_norm_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    if config.norm_before_fc:
        return {"input_norm.weight": (NUM_TAPS * config.target_hidden_size,)}
    if config.fc_norm:
        return {f"fc_norm.{tap}.weight": (config.target_hidden_size,) for tap in range(NUM_TAPS)}
    return {}


def _layer_config(config: ConfigFields, eagle: ConfigFields) -> ModelConfig:
    """The one layer of the head, read as a decoder of its family."""
    source = config.source
    is_speculators = "speculators_model_type" in config.values
    kind = config.text("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise UserError(
            f"{source}: speculators_model_type {shown(kind)} is not supported; set {KNOB} to an eagle3 head"
        )
    if not eagle.flag("use_aux_hidden_state", True):
        raise UserError(f"{source}: use_aux_hidden_state is false, so this is no EAGLE-3 head; set {KNOB} to one")
    if is_speculators and not config.object("transformer_layer_config"):
        raise UserError(
            f"{source}: transformer_layer_config is missing; {KNOB} must name a whole speculators checkpoint"
        )
    layer = ConfigFields(config.object("transformer_layer_config") if is_speculators else config.values, source)
    architecture = _layer_architecture(layer)
    num_layers = layer.integer("num_hidden_layers", 1)
    if num_layers != 1:
        raise UserError(
            f"{source}: {num_layers} layers, so this is no EAGLE-3 head, which has one layer; "
            f"set {KNOB} to one, or choose the drafter that the folder is for"
        )
    decoder = {**layer.values, **DENSE_LAYER, "architectures": [architecture], "num_hidden_layers": 1}
    layer_config = read_decoder(decoder, source)
    if layer_config.only_layer.window is not None:
        raise UserError(f"{source}: a head with a sliding window is not supported; set {KNOB} to a full-attention head")
    return layer_config


def _layer_architecture(layer: ConfigFields) -> str:
    """Choose the family that the head's layer is read as: by latent attention, whatever its name, else by the name."""
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
            f"{source}: a head for another target ({'; '.join(differing)}); "
            f"set {KNOB} to a head trained for this target"
        )
    if head.draft_vocab_size > head.target_vocab_size:
        raise UserError(
            f"{source}: draft_vocab_size {head.draft_vocab_size} exceeds the vocab_size of {head.target_vocab_size}; "
            f"set {KNOB} to a head trained for this target"
        )


def _tap_layer_inputs(config: ConfigFields, eagle: ConfigFields, num_layers: int) -> tuple[int, int, int] | None:
    """Tapped layers in the sense "input of layer k".

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
            "(vLLM: inputs); the former are used, which the acceptance length should confirm",
            source,
            LAYER_IDS,
            from_nested,
            from_top_level,
        )
    return from_nested or from_top_level


def _checked_taps(layer_ids: Sequence[int], offset: int, num_layers: int, source: str) -> tuple[int, int, int]:
    taps = sorted(layer + offset for layer in layer_ids)
    if len(layer_ids) != 3 or len(set(taps)) < 3 or taps[0] < 0 or taps[-1] >= num_layers:
        raise UserError(
            f"{source}: {LAYER_IDS} must name three different layers of the target, which has {num_layers} layers, "
            f"but is [{shown_ids(layer_ids)}]; set {KNOB} to a head trained for this target"
        )
    return taps[0], taps[1], taps[2]


def _canonical_names(stored: Mapping[str, StoredTensor], source: str) -> dict[str, StoredTensor]:
    renamed: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        canonical = name.removeprefix("model.")
        if canonical.startswith("layers.0."):
            canonical = canonical.replace("layers.0.", "midlayer.", 1)
        if canonical in renamed:
            raise UserError(f"{source}: {renamed[canonical].name} and {name} are the same tensor; keep one of them")
        renamed[canonical] = tensor
    return renamed


def _checked_vocabulary(maps: Mapping[str, torch.Tensor], config: Eagle3Config, source: str) -> dict[str, torch.Tensor]:
    """`d2t` as int64 and `t2d` as bool, where the file has them, once they agree with the config and each other."""
    draft_size, target_size = config.draft_vocab_size, config.target_vocab_size
    if "d2t" not in maps:
        if draft_size == target_size:
            return {}
        raise UserError(
            f"{source}: d2t is missing, and the draft vocabulary of {draft_size} is a part of the target's "
            f"{target_size}; set {KNOB} to a whole checkpoint"
        )
    for name, size in (("d2t", draft_size), ("t2d", target_size)):
        if name in maps and maps[name].shape != (size,):
            raise UserError(f"{source}: {name} has shape {list(maps[name].shape)}, config.json says [{size}]")
    d2t = maps["d2t"].to(torch.int64)
    target_ids = torch.arange(draft_size) + d2t
    outside = target_ids[(target_ids < 0) | (target_ids >= target_size)]
    if len(outside):
        raise UserError(
            f"{source}: d2t names target id {outside[0].item()}, outside the target's vocabulary of {target_size}; "
            f"set {KNOB} to a head trained for this target"
        )
    if len(set(target_ids.tolist())) < draft_size:
        raise UserError(f"{source}: d2t gives one target id to two draft ids; set {KNOB} to an intact checkpoint")
    if "t2d" not in maps:
        return {"d2t": d2t}
    t2d = maps["t2d"].to(torch.bool)
    if not torch.equal(torch.zeros_like(t2d).index_fill(0, target_ids, True), t2d):
        raise UserError(f"{source}: d2t and t2d name different target ids; set {KNOB} to an intact checkpoint")
    return {"d2t": d2t, "t2d": t2d}
