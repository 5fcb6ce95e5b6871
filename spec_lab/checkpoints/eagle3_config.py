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

from spec_lab.checkpoints.checks import refuse_other_target, refuse_values
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families import read_decoder
from spec_lab.checkpoints.json_input import present, read_json
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.checkpoints.taps import refuse_taps, taps_of_inputs
from spec_lab.core.errors import UserError

logger = logging.getLogger(__name__)

KNOB = "drafter.path"
LAYER_TYPES = ("llama", "qwen3")
HeadKind = Literal["eagle3", "peagle"]
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
    whole, source = read_json(folder / "config.json"), str(folder / "config.json")
    config = present(whole)
    eagle = present(config.get("eagle_config", {}))
    layers = _layer_config(whole, eagle, kind, source)
    layer = replace(layers, layers=layers.layers[:1])
    # NVIDIA's heads have norm_before_fc in `eagle_config` (vLLM #42143). A key at the top level overrides it. The
    # defaults of speculators for norm_before_residual differ (class false, training command true), so its files must
    # have the key.
    keys = {**({} if "speculators_model_type" in config else {"norm_before_residual": False}), **eagle, **config}
    head = Eagle3Config(
        layer=replace(
            layer, max_position_embeddings=max(layer.max_position_embeddings, target.max_position_embeddings)
        ),
        target_hidden_size=keys.get("target_hidden_size", layer.hidden_size),
        draft_vocab_size=keys.get("draft_vocab_size", layer.vocab_size),
        target_vocab_size=layer.vocab_size,
        tap_layer_inputs=_tap_layer_inputs(config, eagle, target.num_layers, source),
        norm_before_residual=keys["norm_before_residual"],
        **{name: keys.get(name, False) for name in ("norm_before_fc", "fc_norm", "norm_output")},
        more_layers=layers.layers[1:],
        mask_token_id=None if kind == "eagle3" else keys["mask_token_id"],
    )
    pairs = {
        "target_hidden_size": (head.target_hidden_size, target.hidden_size),
        "vocab_size": (head.target_vocab_size, target.vocab_size),
    }
    refuse_other_target(source, KNOB, pairs)
    return head


def _layer_config(config: Mapping[str, Any], eagle: Mapping[str, Any], wanted: HeadKind, source: str) -> ModelConfig:
    """Read the layers of the head as a decoder of their family; an EAGLE-3 head has one layer."""
    layer = config.get("transformer_layer_config", config)  # a null of it can have a meaning, as of q_lora_rank
    is_latent = layer.get("kv_lora_rank") is not None
    supported: dict[str, tuple[Any, ...]] = {
        "medusa_num_heads": (),
        "speculators_model_type": (wanted,),
        "use_aux_hidden_state": (True,),
        "use_sliding_window": (False,),
        "mla_use_nope": (False,),
        **({} if is_latent else {"model_type": LAYER_TYPES}),
        **({"num_hidden_layers": (1,)} if wanted == "eagle3" else {}),
    }
    refuse_values(source, {**config, **eagle, **layer}, supported)
    model_type = "deepseek_v3" if is_latent else layer.get("model_type") or "llama"
    num_layers = layer.get("num_hidden_layers") or 1
    # A head's MLPs are dense, but its config.json may repeat the target's keys for experts (NVIDIA ModelOpt).
    dense = {"mlp_layer_types": ["dense"] * num_layers, "num_hidden_layers": num_layers}
    decoder = {**layer, **dense, "model_type": model_type}
    return read_decoder(decoder, source)


def _tap_layer_inputs(
    config: Mapping[str, Any], eagle: Mapping[str, Any], num_layers: int, source: str
) -> tuple[int, int, int] | None:
    """Return the tapped layers in the sense "input of layer k"; None if the config names none.

    The same key has two meanings: SGLang reads it inside `eagle_config` only, as the output of layer k; vLLM reads it
    at the top level only, as the input of layer k.
    """
    nested, top_level = eagle.get(LAYER_IDS), config.get(LAYER_IDS)
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
    inputs = sorted(layer + offset for layer in layer_ids)
    refuse_taps(source, LAYER_IDS, taps_of_inputs(inputs), num_layers, NUM_TAPS)
    return inputs[0], inputs[1], inputs[2]
