"""The names under which model families store their multi-token prediction (MTP, NextN) modules, and how these differ.

Sources: the loaders of vLLM (`deepseek_mtp`, `glm4_moe_mtp`, `mimo_mtp`, `qwen3_5_mtp`), and README_WEIGHTS.md of
DeepSeek-V3. Modules of every family here read hidden states after the final norm (vLLM #46075, llama.cpp #24025,
ROCm/ATOM #1764). Older engines read DeepSeek's before it, which the drafter's knobs can also choose.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from spec_lab.core.types import NormSide

EMBEDDING_NORM = "enorm.weight"
HIDDEN_NORM = "hnorm.weight"
PROJECTION = "eh_proj.weight"
FINAL_NORM = "shared_head.norm.weight"


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """The layout of a family's modules.

    In prefixes, {module} is the module's number m, and {layer} is num_hidden_layers + m.

    Attributes:
        module_prefix: prefix of the two input norms, the projection and the final norm.
        layer_prefix: prefix of the decoder layer's tensors.
        names: the family's names, by DeepSeek's `enorm`, `hnorm`, `eh_proj` and `shared_head.norm`.
        model_type: the family as which a layer's config is read if config.json names none that is known. A layer with
            latent attention does not use it.
        hidden_first: whether the projection reads [hidden, embedding] rather than [embedding, hidden].
        zero_centred: whether norms multiply by 1 + weight.
        target_hidden: whether a module reads the target's hidden state before or after the target's final norm.
        recycled_hidden: whether the next draft reads a module's hidden state before or after the module's final norm.
    """

    module_prefix: str
    layer_prefix: str
    names: Mapping[str, str]
    model_type: str
    hidden_first: bool = False
    zero_centred: bool = False
    target_hidden: NormSide = NormSide.POST_NORM
    recycled_hidden: NormSide = NormSide.POST_NORM

    def prefixes(self, module: int, num_layers: int) -> tuple[str, str]:
        """Return what the names of a module, and of its decoder layer, begin with in the file."""
        numbers = {"module": module, "layer": num_layers + module}
        return self.module_prefix.format(**numbers), self.layer_prefix.format(**numbers)

    def file_name(self, name: str, module: int, num_layers: int) -> str:
        """Return the file's name of a module's tensor in the common form."""
        of_module, of_layer = self.prefixes(module, num_layers)
        return of_module + self.names[name] if name in self.names else of_layer + name


DEEPSEEK = MtpLayout(
    module_prefix="model.layers.{layer}.",
    layer_prefix="model.layers.{layer}.",
    names={name: name for name in (EMBEDDING_NORM, HIDDEN_NORM, PROJECTION, FINAL_NORM)},
    model_type="llama",
)
MIMO = MtpLayout(
    module_prefix="model.mtp_layers.{module}.",
    layer_prefix="model.mtp_layers.{module}.",
    names={
        EMBEDDING_NORM: "token_layernorm.weight",
        HIDDEN_NORM: "hidden_layernorm.weight",
        PROJECTION: "input_proj.weight",
        FINAL_NORM: "final_layernorm.weight",
    },
    model_type="qwen2",
    hidden_first=True,
)
QWEN3_NEXT = MtpLayout(
    module_prefix="mtp.",
    layer_prefix="mtp.layers.{module}.",
    names={
        EMBEDDING_NORM: "pre_fc_norm_embedding.weight",
        HIDDEN_NORM: "pre_fc_norm_hidden.weight",
        PROJECTION: "fc.weight",
        FINAL_NORM: "norm.weight",
    },
    model_type="qwen3_next",
    zero_centred=True,
)
LAYOUTS = (DEEPSEEK, MIMO, QWEN3_NEXT)


def find_layout(stored: Collection[str], num_layers: int) -> MtpLayout | None:
    """Return the layout whose module 0 is among the stored names, by its projection; None if there is none."""
    return next((layout for layout in LAYOUTS if layout.file_name(PROJECTION, 0, num_layers) in stored), None)
