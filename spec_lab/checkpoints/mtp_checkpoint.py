"""Reads multi-token prediction (MTP, NextN) modules, from a folder of their own or from their target's checkpoint.

Tensors of every family are returned in one common form. They have DeepSeek's names without prefix (`enorm.weight`,
`hnorm.weight`, `eh_proj.weight`, `input_layernorm.weight`, `self_attn.*`, `mlp.*`, `shared_head.norm.weight`). The
projection reads [embedding, hidden], and norms multiply by their weight w, not by 1 + w.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spec_lab.checkpoints.checkpoint import check_floating, check_tensors, read_tensors, stored_tensors
from spec_lab.checkpoints.checkpoint_files import StoredTensor
from spec_lab.checkpoints.checks import refuse_other_target, refuse_values
from spec_lab.checkpoints.config import ModelConfig, num_mtp_modules, read_keys, text_part
from spec_lab.checkpoints.families import FAMILIES, read_decoder
from spec_lab.checkpoints.mtp_layouts import (
    EMBEDDING_NORM,
    FINAL_NORM,
    HIDDEN_NORM,
    PROJECTION,
    MtpLayout,
    find_layout,
)
from spec_lab.checkpoints.target_tensors import zero_centred
from spec_lab.checkpoints.tensor_shapes import layer_tensor_shapes
from spec_lab.core.errors import UserError
from spec_lab.core.types import NormSide

KNOB = "drafter.path"
# Other engines too use the target's embedding and head instead of these copies.
SKIPPED_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
LATENT_TENSOR = "self_attn.kv_a_proj_with_mqa.weight"
QK_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
EXPERT_TENSORS = ("mlp.gate.", "mlp.experts.", "mlp.shared_expert")


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """The sizes that the modules of a checkpoint have in common.

    Attributes:
        layer: sizes, rope and options of a module's one decoder layer.
        num_modules: number of modules that the checkpoint's config names; 1 if it names none.
        target_hidden: whether a module reads the target's hidden state before or after the target's final norm.
        recycled_hidden: whether the next draft reads a module's hidden state before or after the module's final norm.
    """

    layer: ModelConfig
    num_modules: int
    target_hidden: NormSide
    recycled_hidden: NormSide


def load_mtp(
    folder: Path, target: ModelConfig, num_modules: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[MtpConfig, list[dict[str, torch.Tensor]]]:
    """Read the first `num_modules` modules for a target: their config, and each one's tensors in the common form.

    Tensors of the target's own layers are ignored if the checkpoint has them, as are copies of its embedding and head.

    Raises:
        UserError: no module, or too few; a block or experts that are not supported; a module for another target;
            tensors missing, of another shape, not expected or in an unsupported quantization.
    """
    config, source = read_keys(folder), str(folder)
    decoder, count = text_part(config), num_mtp_modules(config) or 1
    num_layers, stored = decoder["num_hidden_layers"], stored_tensors(folder)
    layout = find_layout(stored, num_layers)
    if layout is None or num_modules > count:
        found = count if layout else 0
        raise UserError(
            f"{folder}: has {found} MTP modules, and {num_modules} are needed; use fewer drafts or another {KNOB}"
        )
    starts, first = zip(*(layout.prefixes(module, num_layers) for module in range(count)), strict=True)
    own = {name: it for name, it in stored.items() if name.startswith(starts) and not name.endswith(SKIPPED_COPIES)}
    names = {name.removeprefix(first[0]) for name in own if name.startswith(first[0])}
    layer = _layer_config(decoder, layout, names, source)
    pairs = {
        "hidden_size": (layer.hidden_size, target.hidden_size),
        "vocab_size": (layer.vocab_size, target.vocab_size),
    }
    refuse_other_target(source, KNOB, pairs)
    shapes = mtp_tensor_shapes(layer)
    wanted = [
        {layout.file_name(name, module, num_layers): shape for name, shape in shapes.items()} for module in range(count)
    ]
    check_tensors(own, {name: shape for of_module in wanted for name, shape in of_module.items()}, (), str(folder))
    check_floating(own, str(folder))
    modules = [
        _common_form({name: own[stored] for name, stored in zip(shapes, of_module, strict=True)}, layout, dtype, device)
        for of_module in wanted[:num_modules]
    ]
    return MtpConfig(layer, count, layout.target_hidden, layout.recycled_hidden), modules


def mtp_tensor_shapes(layer: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of one module's tensors in the common form."""
    hidden = layer.hidden_size
    return {
        EMBEDDING_NORM: (hidden,),
        HIDDEN_NORM: (hidden,),
        PROJECTION: (hidden, 2 * hidden),
        **layer_tensor_shapes(layer.only_layer, hidden, attention_input_size=hidden),
        FINAL_NORM: (hidden,),
    }


def _layer_config(decoder: Mapping[str, Any], layout: MtpLayout, names: Collection[str], source: str) -> ModelConfig:
    """Return a module's decoder layer, which is one of the family that the config names if that is a known one.

    The stored `names` decide whether attention has biases, and whether there are experts. q and k have norms if the
    family or `names` have them.
    """
    refuse_values(source, decoder, {"use_sliding_window": (False,)})
    model_type = decoder.get("model_type")
    if model_type not in FAMILIES:
        model_type = "deepseek_v3" if LATENT_TENSOR in names else layout.model_type
    one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_layer_types": ["sparse"]}
    layer = read_decoder({**decoder, **one_layer, "model_type": model_type}, source)
    plan = replace(
        layer.only_layer,
        qkv_bias="self_attn.q_proj.bias" in names,
        o_bias="self_attn.o_proj.bias" in names,
        qk_norm=layer.only_layer.qk_norm or any(name in names for name in QK_NORMS),
        experts=layer.only_layer.experts if any(name.startswith(EXPERT_TENSORS) for name in names) else None,
    )
    return replace(layer, layers=(plan,))


def _common_form(
    stored: Mapping[str, StoredTensor], layout: MtpLayout, dtype: torch.dtype, device: torch.device | str
) -> dict[str, torch.Tensor]:
    """Read one module, and convert its family's norms and projection to the common form."""
    if layout.zero_centred:
        stored = {name: zero_centred(it) if name.endswith("norm.weight") else it for name, it in stored.items()}
    tensors = read_tensors(stored, dtype, device)
    if layout.hidden_first:
        hidden, embedding = tensors[PROJECTION].chunk(2, dim=1)
        tensors[PROJECTION] = torch.cat((embedding, hidden), dim=1)
    return tensors
