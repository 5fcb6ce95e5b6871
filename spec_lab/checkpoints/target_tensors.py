"""A target's own tensors among those of its checkpoint, under the names and in the form that its layers read.

The names are Llama's, and Qwen3.5's for what a Llama has not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

import torch

from spec_lab.checkpoints.checkpoint import Names, renamed
from spec_lab.checkpoints.checkpoint_files import StoredTensor
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.gguf_file import is_gguf
from spec_lab.checkpoints.plan import LayerPlan

OTHER_SENSES = re.compile(
    r"(model\.)?(visual|vision_tower|audio_tower|embed_vision|embed_audio|multi_modal_projector|mm_projector)\."
)
"""Towers of multimodal models, and the projections that turn an image or a sound into rows of the decoder."""
NAMES: Names = (
    (r"^(model\.language_model|language_model\.model)\.", "model."),
    (r"^language_model\.", ""),
    (r"\.block_sparse_moe\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),  # MiniMax-M2
    (r"\.block_sparse_moe\.", ".mlp."),
)
# A layer that reads another layer's KV does not use these, but the files on the hub have them (Gemma 4).
DEAD = ("k_proj.weight", "v_proj.weight", "k_norm.weight")


def without_mtp(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors without those of MTP modules, which belong to a drafter.

    DeepSeek names a module like a layer, but only a module has an `eh_proj`. Other families name modules by a prefix.
    """
    suffix = "eh_proj.weight"
    layers = tuple(name.removesuffix(suffix) for name in stored if name.endswith(f".{suffix}"))
    prefixes = ("mtp.", "model.mtp_layers.", *layers)
    return {name: tensor for name, tensor in stored.items() if not name.startswith(prefixes)}


def target_tensors(stored: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """Return the decoder's tensors of a checkpoint of any family."""
    own = {name: tensor for name, tensor in without_mtp(stored).items() if not OTHER_SENSES.match(name)}
    tensors = renamed(own, NAMES)
    for index, plan in enumerate(config.layers):
        prefix = f"model.layers.{index}."
        if plan.kv_owner is not None:
            for name in DEAD:
                tensors.pop(f"{prefix}self_attn.{name}", None)
        for fused, (num_heads, rows, products) in _fused_products(plan).items():
            whole = tensors.get(f"{prefix}{fused}.weight")
            if whole is not None and whole.shape[0] == num_heads * sum(rows):  # another size is refused later
                del tensors[f"{prefix}{fused}.weight"]
                for name, parts in products.items():
                    form = partial(rows_of_heads, num_heads=num_heads, rows=rows, picked=parts)
                    tensors[f"{prefix}{name}.weight"] = whole.made(form)
    if config.family == "hybrid":  # the norms of a GGUF file have their 1
        is_centred = {name: counts_from_one(name) and not is_gguf(it.file) for name, it in tensors.items()}
        tensors = {name: zero_centred(it) if is_centred[name] else it for name, it in tensors.items()}
    factors = dict(config.factors)
    if factors:  # Granite's constants; a tied head is then a tensor of its own
        tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
        for name, tensor in tensors.items():
            if (product := name.split(".")[-2]) in factors:
                tensors[name] = tensor.made(partial(torch.mul, other=factors[product]))
    return tensors


def rows_of_heads(
    grouped: torch.Tensor, num_heads: int, rows: tuple[int, ...], picked: tuple[int, ...]
) -> torch.Tensor:
    """Return the `picked` parts of a tensor: first one part of all heads, then the next part. `rows` has the number of
    rows of each part of a head."""
    parts = grouped.unflatten(0, (num_heads, -1)).split(rows, dim=1)
    return torch.cat([parts[part].flatten(0, 1) for part in picked])


def _fused_products(plan: LayerPlan) -> Mapping[str, tuple[int, tuple[int, ...], Mapping[str, tuple[int, ...]]]]:
    """Return what Phi-3 and Qwen3-Next have in one tensor: a number of heads, whose rows are together, the number of
    rows of each part of a head, and the parts of each product."""
    if (sizes := plan.delta_net) is None:
        queries, keys, inner = plan.num_heads * plan.head_dim, plan.num_kv_heads * plan.head_dim, plan.intermediate_size
        attention = {f"self_attn.{name}_proj": (part,) for part, name in enumerate("qkv")}
        mlp = {"mlp.gate_proj": (0,), "mlp.up_proj": (1,)}
        return {
            "self_attn.qkv_proj": (1, (queries, keys, keys), attention),
            "mlp.gate_up_proj": (1, (inner, inner), mlp),
        }
    heads, group = sizes.num_key_heads, sizes.num_value_heads // sizes.num_key_heads
    of_head = (sizes.key_head_dim, sizes.key_head_dim, group * sizes.value_head_dim, group * sizes.value_head_dim)
    qkvz = {"linear_attn.in_proj_qkv": (0, 1, 2), "linear_attn.in_proj_z": (3,)}
    ba = {"linear_attn.in_proj_b": (0,), "linear_attn.in_proj_a": (1,)}
    return {
        "linear_attn.in_proj_qkvz": (heads, of_head, qkvz),
        "linear_attn.in_proj_ba": (heads, (group, group), ba),
    }


def counts_from_one(name: str) -> bool:
    """Return whether a tensor of Qwen3.5 or Qwen3-Next is the weight w of a norm that multiplies by 1 + w, as all but
    the delta nets' norms do."""
    return name.endswith("norm.weight") and not name.endswith(".linear_attn.norm.weight")


def zero_centred(tensor: StoredTensor) -> StoredTensor:
    """Replace the weight w of a norm by 1 + w, in float32, since bfloat16 would round it by up to 0.4 %."""
    return tensor.made(lambda weight: 1 + weight.float(), kept=torch.float32)
