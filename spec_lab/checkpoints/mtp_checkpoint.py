"""Reads multi-token prediction (MTP, NextN) modules, from a folder of their own or from their target's checkpoint.

Tensors of every family are returned in one common form. They have DeepSeek's names without prefix (`enorm.weight`,
`hnorm.weight`, `eh_proj.weight`, `input_layernorm.weight`, `self_attn.*`, `mlp.*`, `shared_head.norm.weight`). The
projection reads [embedding, hidden], and norms multiply by their weight w, not by 1 + w.

Sources of the families' names: the loaders of vLLM (`deepseek_mtp`, `glm4_moe_mtp`, `mimo_mtp`, `qwen3_5_mtp`), and
README_WEIGHTS.md of DeepSeek-V3. Modules of every family here read hidden states after the final norm (vLLM #46075,
llama.cpp #24025, ROCm/ATOM #1764). Older engines read DeepSeek's before it, which the drafter's knobs can also choose.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spec_lab.checkpoints.checkpoint import check_floating, check_tensors, read_tensors, stored_tensors
from spec_lab.checkpoints.checkpoint_files import StoredTensor
from spec_lab.checkpoints.config import ModelConfig, num_mtp_modules, read_keys, text_part
from spec_lab.checkpoints.families import FAMILIES, read_decoder
from spec_lab.checkpoints.json_input import refuse_other_target, refuse_values
from spec_lab.checkpoints.target_tensors import zero_centred
from spec_lab.checkpoints.tensor_shapes import Shapes, layer_tensor_shapes
from spec_lab.core.errors import UserError
from spec_lab.core.types import NormSide

# Other engines too use the target's embedding and head instead of these copies.
SKIPPED_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
LATENT_TENSOR = "self_attn.kv_a_proj_with_mqa.weight"
QK_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
EXPERT_TENSORS = ("mlp.gate.", "mlp.experts.", "mlp.shared_expert")
EMBEDDING_NORM = "enorm.weight"
HIDDEN_NORM = "hnorm.weight"
PROJECTION = "eh_proj.weight"
FINAL_NORM = "shared_head.norm.weight"
OUTSIDE_LAYER = (EMBEDDING_NORM, HIDDEN_NORM, PROJECTION, FINAL_NORM)


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """The layout of a family's modules.

    In prefixes, {module} is the module's number m, and {layer} is num_hidden_layers + m.

    Attributes:
        module_prefix: prefix of the two input norms, the projection and the final norm.
        layer_prefix: prefix of the decoder layer's tensors.
        names: the family's names of `OUTSIDE_LAYER`.
        model_type: the family as which a layer's config is read if config.json names none that is known. A layer with
            latent attention does not use it.
        hidden_first: whether the projection reads [hidden, embedding] rather than [embedding, hidden].
        zero_centred: whether norms multiply by 1 + weight.
    """

    module_prefix: str
    layer_prefix: str
    names: tuple[str, str, str, str]
    model_type: str
    hidden_first: bool = False
    zero_centred: bool = False

    def prefixes(self, module: int, num_layers: int) -> tuple[str, str]:
        """Return what the names of a module, and of its decoder layer, begin with in the file."""
        numbers = {"module": module, "layer": num_layers + module}
        return self.module_prefix.format(**numbers), self.layer_prefix.format(**numbers)

    def file_name(self, name: str, module: int, num_layers: int) -> str:
        """Return the file's name of a module's tensor in the common form."""
        of_module, of_layer = self.prefixes(module, num_layers)
        theirs = dict(zip(OUTSIDE_LAYER, self.names, strict=True)).get(name)
        return of_layer + name if theirs is None else f"{of_module}{theirs}.weight"

    def common_form(self, name: str, stored: StoredTensor) -> StoredTensor:
        """Return the tensor that has this name in the common form."""
        if self.zero_centred and name.endswith("norm.weight"):
            return zero_centred(stored)
        if self.hidden_first and name == PROJECTION:
            return stored.made(lambda weight: torch.cat(weight.chunk(2, dim=1)[::-1], dim=1))
        return stored


DEEPSEEK = MtpLayout(
    "model.layers.{layer}.", "model.layers.{layer}.", ("enorm", "hnorm", "eh_proj", "shared_head.norm"), "llama"
)
MIMO = MtpLayout(
    "model.mtp_layers.{module}.",
    "model.mtp_layers.{module}.",
    ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    "qwen2",
    hidden_first=True,
)
QWEN3_NEXT = MtpLayout(
    "mtp.",
    "mtp.layers.{module}.",
    ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    "qwen3_next",
    zero_centred=True,
)
LAYOUTS = (DEEPSEEK, MIMO, QWEN3_NEXT)


def find_layout(stored: Collection[str], num_layers: int) -> MtpLayout | None:
    """Return the layout whose module 0 is among the stored names, by its projection; None if there is none."""
    return next((layout for layout in LAYOUTS if layout.file_name(PROJECTION, 0, num_layers) in stored), None)


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
    target_hidden: NormSide = NormSide.POST_NORM
    recycled_hidden: NormSide = NormSide.POST_NORM


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
            f"{folder}: has {found} MTP modules, and {num_modules} are needed; use fewer drafts or another drafter.path"
        )
    starts, first = zip(*(layout.prefixes(module, num_layers) for module in range(count)), strict=True)
    own = {name: it for name, it in stored.items() if name.startswith(starts) and not name.endswith(SKIPPED_COPIES)}
    names = {name.removeprefix(first[0]) for name in own if name.startswith(first[0])}
    layer = _layer_config(decoder, layout, names, source)
    pairs = {
        "hidden_size": (layer.hidden_size, target.hidden_size),
        "vocab_size": (layer.vocab_size, target.vocab_size),
    }
    refuse_other_target(source, pairs)
    shapes = mtp_tensor_shapes(layer)
    modules = [{name: layout.file_name(name, module, num_layers) for name in shapes} for module in range(count)]
    check_tensors(own, {theirs: shapes[name] for names in modules for name, theirs in names.items()}, (), source)
    check_floating(own, source)
    stored_modules = [
        {name: layout.common_form(name, own[theirs]) for name, theirs in names.items()}
        for names in modules[:num_modules]
    ]
    return MtpConfig(layer, count), [read_tensors(of_module, dtype, device) for of_module in stored_modules]


def mtp_tensor_shapes(layer: ModelConfig) -> Shapes:
    """Return the names and shapes of one module's tensors in the common form."""
    hidden = layer.hidden_size
    return {
        EMBEDDING_NORM: (hidden,),
        HIDDEN_NORM: (hidden,),
        PROJECTION: (hidden, 2 * hidden),
        **layer_tensor_shapes(layer.only_layer, hidden),
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
