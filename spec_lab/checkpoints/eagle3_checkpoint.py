"""Reads EAGLE-3 draft heads: SafeAILab's layout, which vLLM and SGLang read too, and that of vLLM's speculators.

EAGLE-3: Li et al. 2025, arXiv 2503.01840. A head's layer has grouped-query attention, or latent attention (MLA, as the
heads for Kimi-K2.5). From either layout, tensors are returned under SafeAILab's names (`fc.weight`, `midlayer.*`,
`norm.weight`, `lm_head.weight`, `d2t`, `t2d`, `embed_tokens.weight`). Those that only EAGLE-3.1 or P-EAGLE has keep the
speculators' names (`input_norm.weight`, `fc_norm.{0,1,2}.weight`; `mask_hidden`, `layers.{1,2,...}.*`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from spec_lab.checkpoints.checkpoint import Names, read_tensors, read_wanted, renamed, stored_tensors
from spec_lab.checkpoints.checkpoint_files import StoredTensor
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families import read_decoder
from spec_lab.checkpoints.json_input import present, read_json, refuse_other_target, refuse_values
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.checkpoints.taps import refuse_taps, taps_of_inputs
from spec_lab.checkpoints.tensor_shapes import Shapes, below, layer_tensor_shapes, norms, weights
from spec_lab.core.errors import UserError

logger = logging.getLogger(__name__)

HeadKind = Literal["eagle3", "peagle"]
NUM_TAPS = 3
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NAMES: Names = ((r"^model\.", ""), (r"^layers\.0\.", "midlayer."))
MAPS = ("d2t", "t2d")


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """An EAGLE-3 head of one layer, or a P-EAGLE head of one or more.

    Attributes:
        layer: the first layer as a decoder of one layer, with its own rope; its `max_position_embeddings` is at least
            the target's.
        tap_layer_inputs: the target's layers whose inputs the head reads, ascending.
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
    tap_layer_inputs: tuple[int, int, int]
    norm_before_residual: bool
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    more_layers: tuple[LayerPlan, ...] = ()
    mask_token_id: int | None = None


def default_tap_layer_inputs(num_layers: int) -> tuple[int, int, int]:
    """Return the layers whose inputs EAGLE-3 heads read unless their config says otherwise.

    Raises:
        UserError: a target with fewer than 7 layers, where the three are not ascending.
    """
    taps = (2, num_layers // 2, num_layers - 3)
    if not taps[0] < taps[1] < taps[2]:
        raise UserError(
            f"an EAGLE-3 head reads three layers, for which a target of {num_layers} layers is too shallow; choose "
            "another drafter, such as drafter=ngram"
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
    body = _layer_config(whole, eagle, kind, source)
    positions = max(body.max_position_embeddings, target.max_position_embeddings)
    layer = replace(body, layers=body.layers[:1], max_position_embeddings=positions)
    # NVIDIA's heads have norm_before_fc in `eagle_config` (vLLM #42143). A key at the top level overrides it. The
    # defaults of speculators for norm_before_residual differ (class false, training command true), so its files must
    # have the key.
    keys = {**({} if "speculators_model_type" in config else {"norm_before_residual": False}), **eagle, **config}
    head = Eagle3Config(
        layer=layer,
        target_hidden_size=keys.get("target_hidden_size", layer.hidden_size),
        draft_vocab_size=keys.get("draft_vocab_size", layer.vocab_size),
        target_vocab_size=layer.vocab_size,
        tap_layer_inputs=_tap_layer_inputs(config, eagle, target.num_layers, source),
        norm_before_residual=keys["norm_before_residual"],
        **{name: keys.get(name, False) for name in ("norm_before_fc", "fc_norm", "norm_output")},
        more_layers=body.layers[1:],
        mask_token_id=None if kind == "eagle3" else keys["mask_token_id"],
    )
    refuse_other_target(source, target, hidden_size=head.target_hidden_size, vocab_size=head.target_vocab_size)
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
        **({} if is_latent else {"model_type": ("llama", "qwen3")}),
        **({"num_hidden_layers": (1,)} if wanted == "eagle3" else {}),
    }
    refuse_values(source, {**config, **eagle, **layer}, supported)
    model_type = "deepseek_v3" if is_latent else layer.get("model_type") or "llama"
    num_layers = layer.get("num_hidden_layers") or 1
    # A head's MLPs are dense, but its config.json may repeat the target's keys for experts (NVIDIA ModelOpt).
    dense = {"mlp_layer_types": ["dense"] * num_layers, "num_hidden_layers": num_layers}
    return read_decoder({**layer, **dense, "model_type": model_type}, source)


def _tap_layer_inputs(
    config: Mapping[str, Any], eagle: Mapping[str, Any], num_layers: int, source: str
) -> tuple[int, int, int]:
    """Return the tapped layers in the sense "input of layer k", which are the default if the config names none.

    The same key has two meanings: SGLang reads it inside `eagle_config` only, as the output of layer k; vLLM reads it
    at the top level only, as the input of layer k.
    """
    named = [[layer + offset for layer in keys.get(LAYER_IDS) or ()] for keys, offset in ((eagle, 1), (config, 0))]
    found = [sorted(inputs) for inputs in named if inputs]
    for inputs in found:
        refuse_taps(source, LAYER_IDS, taps_of_inputs(inputs), num_layers, NUM_TAPS)
    if len(found) == 2 and found[0] != found[1]:
        text = "%s: %s is %s inside eagle_config (counted as inputs) but %s at the top level; the former is used"
        logger.warning(text, source, LAYER_IDS, *found)
    return (found[0][0], found[0][1], found[0][2]) if found else default_tap_layer_inputs(num_layers)


def load_eagle3(
    folder: Path, target: ModelConfig, dtype: torch.dtype, device: torch.device | str, kind: HeadKind = "eagle3"
) -> tuple[Eagle3Config, dict[str, torch.Tensor]]:
    """Read a head for a target: its config, and its tensors under SafeAILab's names.

    Weights are cast to `dtype`. `d2t` is [draft_vocab_size] int64, the offset from draft id to target id; `t2d` is
    [target_vocab_size] bool. A head as wide as the target may lack `embed_tokens.weight` and, without a draft
    vocabulary, `lm_head.weight`; the target's are used instead. A head without a draft vocabulary may lack `d2t`: its
    draft ids are target ids. `t2d` is only returned with `d2t`.

    Raises:
        UserError: the errors of `read_eagle3_config`; tensors missing, of another shape, not expected or in an
            unsupported quantization; a vocabulary map that is out of range or contradicts itself.
    """
    config = read_eagle3_config(folder, target, kind)
    stored = renamed(stored_tensors(folder), NAMES)
    sizes = config.draft_vocab_size, config.target_vocab_size
    vocabulary = read_vocabulary(stored, *sizes, device, str(folder))
    optional: set[str] = set()  # the target's can replace them
    if config.layer.hidden_size == target.hidden_size:
        optional = {"embed_tokens.weight"} | ({"lm_head.weight"} if sizes[0] == sizes[1] else set())
    tensors = read_wanted(stored, eagle3_tensor_shapes(config), dtype, device, str(folder), optional)
    return config, tensors | vocabulary


def eagle3_tensor_shapes(config: Eagle3Config) -> Shapes:
    """Return the names and shapes of a head's weights, without the vocabulary maps.

    The first layer's first products read twice the width: the embedding and the feature, each normed. P-EAGLE has
    features of mask rows, and layers after the first.
    """
    hidden, tapped = config.layer.hidden_size, config.target_hidden_size
    shapes: Shapes = {}
    if config.norm_before_fc:
        shapes = norms(NUM_TAPS * tapped, "input_norm")
    elif config.fc_norm:
        shapes = norms(tapped, *(f"fc_norm.{tap}" for tap in range(NUM_TAPS)))
    shapes |= weights({"fc": (hidden, NUM_TAPS * tapped)})
    first = layer_tensor_shapes(config.layer.only_layer, hidden, 2 * hidden)
    shapes |= below("midlayer", norms(hidden, "hidden_norm") | first) | norms(hidden, "norm")
    tables = {"lm_head": config.draft_vocab_size, "embed_tokens": config.target_vocab_size}
    shapes |= weights({name: (size, hidden) for name, size in tables.items()})
    if config.mask_token_id is not None:
        shapes["mask_hidden"] = (1, 1, NUM_TAPS * tapped)
    for index, plan in enumerate(config.more_layers, start=1):
        shapes |= below(f"layers.{index}", layer_tensor_shapes(plan, hidden))
    return shapes


def read_vocabulary(
    stored: dict[str, StoredTensor],
    draft_size: int,
    target_size: int,
    device: torch.device | str,
    source: str,
) -> dict[str, torch.Tensor]:
    """Take `d2t` and `t2d` out of a head's tensors, and read them as int64 and bool, if present. They must agree with
    the config and with each other. A `t2d` without `d2t` is left out."""
    maps = read_tensors({name: stored.pop(name) for name in MAPS if name in stored}, torch.float32, "cpu")
    if "d2t" not in maps and draft_size == target_size:
        return {}
    d2t, t2d = maps.get("d2t", torch.zeros(draft_size)).long(), maps.get("t2d", torch.ones(target_size)).bool()
    ids, has_both = (torch.arange(draft_size) + d2t).sort().values, maps.keys() >= {*MAPS}
    problems = {
        f"d2t is missing, but the draft vocabulary of {draft_size} is smaller than the target's {target_size}": (
            "d2t" not in maps
        ),
        "d2t is all zeros and there is no t2d": draft_size < target_size and not has_both and not d2t.any(),
        f"d2t names a token outside the target's vocabulary of {target_size}": ids[0] < 0 or ids[-1] >= target_size,
        "d2t gives one target id to two draft ids": not ids.diff().all(),
        "d2t and t2d name different target ids": (
            has_both and not (len(t2d) == target_size and torch.equal(ids, t2d.nonzero().flatten()))
        ),
    }
    for problem in (problem for problem, is_there in problems.items() if is_there):
        raise UserError(f"{source}: {problem}")
    return {"d2t": d2t.to(device)} | ({"t2d": t2d.to(device)} if has_both else {})
