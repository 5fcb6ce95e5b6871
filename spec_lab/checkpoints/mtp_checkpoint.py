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

from spec_lab.checkpoints.checkpoint import Names, read_wanted, renamed, stored_tensors
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
EXPERT_TENSORS = ("mlp.gate.", "mlp.experts.", "mlp.shared_expert")
EMBEDDING_NORM = "enorm.weight"
HIDDEN_NORM = "hnorm.weight"
PROJECTION = "eh_proj.weight"
FINAL_NORM = "shared_head.norm.weight"


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """The layout of a family's modules.

    Attributes:
        names: what in a file's names becomes what in those of the common form. In patterns, {module} is the module's
            number m, and {layer} is num_hidden_layers + m.
        model_type: the family as which a layer's config is read if config.json names none that is known. A layer with
            latent attention does not use it.
        hidden_first: whether the projection reads [hidden, embedding] rather than [embedding, hidden].
        zero_centred: whether norms multiply by 1 + weight.
    """

    names: Names
    model_type: str
    hidden_first: bool = False
    zero_centred: bool = False

    def module(self, stored: Mapping[str, StoredTensor], number: int, num_layers: int) -> dict[str, StoredTensor]:
        """Return the tensors of one module in the common form, without copies of the target's."""
        names = tuple((pattern.format(module=number, layer=num_layers + number), new) for pattern, new in self.names)
        whole = zip(stored, renamed(stored, names).items(), strict=True)
        own = {new: tensor for name, (new, tensor) in whole if new != name and new not in SKIPPED_COPIES}
        for name, tensor in own.items():
            if self.zero_centred and name.endswith("norm.weight"):
                own[name] = zero_centred(tensor)
            if self.hidden_first and name == PROJECTION:
                own[name] = tensor.made(lambda weight: torch.cat(weight.chunk(2, dim=1)[::-1], dim=1))
        return own


DEEPSEEK = MtpLayout(((r"^model\.layers\.{layer}\.", ""),), "llama")
MIMO = MtpLayout(
    (
        (r"^model\.mtp_layers\.{module}\.token_layernorm", "enorm"),
        (r"^model\.mtp_layers\.{module}\.hidden_layernorm", "hnorm"),
        (r"^model\.mtp_layers\.{module}\.input_proj", "eh_proj"),
        (r"^model\.mtp_layers\.{module}\.final_layernorm", "shared_head.norm"),
        (r"^model\.mtp_layers\.{module}\.", ""),
    ),
    "qwen2",
    hidden_first=True,
)
QWEN3_NEXT = MtpLayout(
    (
        (r"^mtp\.pre_fc_norm_embedding", "enorm"),
        (r"^mtp\.pre_fc_norm_hidden", "hnorm"),
        (r"^mtp\.fc", "eh_proj"),
        (r"^mtp\.norm", "shared_head.norm"),
        (r"^mtp\.layers\.{module}\.", ""),
        (r"^mtp\.(?!layers\.)", ""),
    ),
    "qwen3_next",
    zero_centred=True,
)
LAYOUTS = (DEEPSEEK, MIMO, QWEN3_NEXT)


def find_layout(stored: Mapping[str, StoredTensor], num_layers: int) -> MtpLayout | None:
    """Return the layout whose module 0 is among the stored tensors, by its projection; None if there is none."""
    return next((layout for layout in LAYOUTS if PROJECTION in layout.module(stored, 0, num_layers)), None)


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """The sizes that the modules of a checkpoint have in common.

    Attributes:
        layer: sizes, rope and options of a module's one decoder layer.
        target_hidden: whether a module reads the target's hidden state before or after the target's final norm.
        recycled_hidden: whether the next draft reads a module's hidden state before or after the module's final norm.
    """

    layer: ModelConfig
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
    decoder = text_part(config)
    num_layers, stored = decoder["num_hidden_layers"], stored_tensors(folder)
    layout = find_layout(stored, num_layers)
    if layout is None or num_modules > (num_mtp_modules(config) or 1):
        raise UserError(f"{folder}: has fewer MTP modules than the {num_modules} that are needed; use fewer drafts")
    modules = [layout.module(stored, number, num_layers) for number in range(num_modules)]
    layer = _layer_config(decoder, layout, modules[0], source)
    refuse_other_target(source, target, hidden_size=layer.hidden_size, vocab_size=layer.vocab_size)
    shapes = mtp_tensor_shapes(layer)
    return MtpConfig(layer), [read_wanted(own, shapes, dtype, device, source) for own in modules]


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
        model_type = "deepseek_v3" if "self_attn.kv_a_proj_with_mqa.weight" in names else layout.model_type
    one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_layer_types": ["sparse"]}
    layer = read_decoder({**decoder, **one_layer, "model_type": model_type}, source)
    plan = replace(
        layer.only_layer,
        qkv_bias="self_attn.q_proj.bias" in names,
        o_bias="self_attn.o_proj.bias" in names,
        qk_norm=layer.only_layer.qk_norm or "self_attn.q_norm.weight" in names,
        experts=layer.only_layer.experts if any(name.startswith(EXPERT_TENSORS) for name in names) else None,
    )
    return replace(layer, layers=(plan,))
