"""The tensors of a GGUF file under the names and in the forms of a Hugging Face folder, dequantised as they are read.

Names, orders and forms are those of llama.cpp's converters (`conversion/`). In a file of Qwen3.5 the value heads of a
delta net take turns over the key heads, its decay is `-exp(A_log)`, and a shared expert's gate has one dimension. This
is undone here. What stays is the 1 that its norms have added (`ADDED`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from spec_lab.checkpoints.checkpoint_files import StoredTensor
from spec_lab.checkpoints.gguf_file import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, GgufFile, TensorPlace, read_head

PERMUTED = ("llama",)
"""Architectures for which llama.cpp rotates neighbouring channels of a head rather than its two halves."""
ADDED = ("qwen35", "qwen35moe")
"""Architectures whose norms multiply by 1 + weight in a folder, and by their weight in a file."""

IN_A_LAYER = re.compile(r"blk\.(?P<layer>\d+)\.(?P<name>.+)")
OUTSIDE: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
MODULES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.embed_tokens": "embed_tokens",
}
"""The modules of a layer, and of an MTP module, which is the block behind the last layer as in DeepSeek's folders."""
TENSORS: Mapping[str, str] = {
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_gate_up_exps.bias": "mlp.experts.gate_up_proj_bias",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
"""Those of a layer that are no module's `weight` or `bias` in a folder."""


def gguf_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the file's tensors; one without a name in a folder keeps its own.

    The divisors of rotary frequencies, which are not weights, are left out.
    """
    file = read_head(path)
    forms = _forms(file)
    stored = {
        name: StoredTensor(path, name, place.shape, "F32", form=partial(dequantised, file, place))
        for name, place in file.places.items()
        if name not in (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
    }
    tensors = {}
    for name, tensor in _with_gate_above_up(stored).items():
        found = IN_A_LAYER.fullmatch(name)
        form = forms.get(found["name"]) if found else None
        is_norm = file.architecture in ADDED and name.endswith("norm.weight") and "ssm_norm" not in name
        whole = replace(tensor, kept=torch.float32 if is_norm else None)
        tensors[_usual_name(name)] = whole if form is None else whole.made(form)
    return tensors


def dequantised(file: GgufFile, place: TensorPlace) -> torch.Tensor:
    """Read a tensor of the file; the library widens it to float32."""
    kind = GGMLQuantizationType(place.code)
    numbers, num_bytes = GGML_QUANT_SIZES[kind]
    width = place.shape[-1] // numbers * num_bytes
    with file.path.open("rb") as source:
        source.seek(file.data_start + place.offset)
        taken = bytearray(source.read(prod(place.shape[:-1]) * width))
    wide = dequantize(np.frombuffer(taken, dtype=np.uint8).reshape(-1, width), kind)
    return torch.from_numpy(np.ascontiguousarray(wide, dtype=np.float32)).view(place.shape)


def quantizations(path: Path) -> list[str]:
    """Return the quantization types of the file's weights, the one with the most weights first."""
    sizes: Counter[str] = Counter()
    for place in read_head(path).places.values():
        sizes[GGMLQuantizationType(place.code).name] += prod(place.shape)
    return [name for name, _ in sizes.most_common()]


def _usual_name(name: str) -> str:
    if (found := IN_A_LAYER.fullmatch(name)) is None:
        return OUTSIDE.get(name, name)
    module, _, last = found["name"].rpartition(".")
    usual = TENSORS.get(found["name"]) or (f"{MODULES[module]}.{last}" if module in MODULES else None)
    return f"model.layers.{found['layer']}.{usual}" if usual else name


def _with_gate_above_up(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Join the experts' gates and ups, which a file may have in one tensor or in two."""
    result = dict(stored)
    for name, gate in stored.items():
        up = stored.get(name.replace("ffn_gate_exps", "ffn_up_exps"))
        if "ffn_gate_exps" in name and up is not None:
            del result[name], result[up.name]
            joined = name.replace("ffn_gate_exps", "ffn_gate_up_exps")
            result[joined] = gate.made(lambda *both: torch.cat(both, dim=1), up)
    return result


def _forms(file: GgufFile) -> Mapping[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return what becomes of a layer's tensors, by their names in the file."""
    sizes: Mapping[str, Any] = file.sizes
    if file.architecture in PERMUTED:
        heads = sizes["attention.head_count"]
        permuted = {"attn_q": heads, "attn_k": sizes.get("attention.head_count_kv", heads)}
        return {
            f"{name}.{last}": partial(halves_together, num_heads=count)
            for name, count in permuted.items()
            for last in ("weight", "bias")
        }
    if file.architecture not in ADDED:
        return {}
    key_heads, value_heads = sizes["ssm.group_count"], sizes["ssm.time_step_rank"]
    grouped = partial(values_by_key_head, counts=(value_heads // key_heads, key_heads))
    behind_keys = partial(grouped, first=2 * key_heads * sizes["ssm.state_size"])
    return {
        "attn_qkv.weight": behind_keys,
        "ssm_conv1d.weight": lambda kernel: behind_keys(kernel).unsqueeze(1),
        **dict.fromkeys(("attn_gate.weight", "ssm_beta.weight", "ssm_alpha.weight", "ssm_dt.bias"), grouped),
        "ssm_a": lambda decay: grouped(decay.neg().double().log().float()),
        "ssm_out.weight": partial(grouped, dim=1),
        "ffn_gate_inp_shexp.weight": lambda gate: gate.view(1, -1),
    }


def halves_together(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Separate the two halves of each head's rows [num_heads * head_dim, ...], which alternate."""
    return rows.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def values_by_key_head(tiled: torch.Tensor, counts: tuple[int, int], first: int = 0, dim: int = 0) -> torch.Tensor:
    """Put the value heads of one key head together; in the file each tile has one of every key head.

    Args:
        counts: value heads of a key head, and key heads.
        first: where value heads begin.
        dim: the dimension of the heads' channels.
    """
    before, values = tiled.split((first, tiled.shape[dim] - first), dim)
    heads = values.unflatten(dim, (*counts, -1)).transpose(dim, dim + 1)
    return torch.cat((before, heads.flatten(dim, dim + 2)), dim)
