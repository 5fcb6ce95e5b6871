"""The tensors of a GGUF file with the names and row order of a Hugging Face folder, dequantised as they are read.

Names, and which rows are permuted, follow llama.cpp's `convert_hf_to_gguf.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from spec_lab.checkpoints.gguf_file import (
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    GgufFile,
    TensorPlace,
    read_head,
)

if TYPE_CHECKING:
    import torch

PERMUTED = ("llama",)
"""Architectures for which llama.cpp rotates neighbouring channels of a head rather than its two halves."""

IN_A_LAYER = re.compile(r"blk\.(?P<layer>\d+)\.(?P<kind>\w+)\.(?P<last>\w+)")
OUTSIDE: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
IN_LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of the file with the name and row order of a Hugging Face folder.

    Attributes:
        num_heads: number of heads of a projection whose heads have interleaved halves; None if rows need no reordering.
    """

    file: GgufFile
    place: TensorPlace
    num_heads: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.place.shape

    def read(self) -> torch.Tensor:
        """Read it, dequantised to float32."""
        import numpy as np
        import torch
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        kind = GGMLQuantizationType(self.place.code)
        numbers, num_bytes = GGML_QUANT_SIZES[kind]
        width = self.shape[-1] // numbers * num_bytes
        with self.file.path.open("rb") as source:
            source.seek(self.file.data_start + self.place.offset)
            taken = bytearray(source.read(prod(self.shape[:-1]) * width))
        wide = dequantize(np.frombuffer(taken, dtype=np.uint8).reshape(-1, width), kind)
        value = torch.from_numpy(np.ascontiguousarray(wide, dtype=np.float32)).view(self.shape)
        if self.num_heads is None:
            return value
        halves = value.view(self.num_heads, -1, 2, *value.shape[1:])
        return halves.transpose(1, 2).reshape(value.shape)


def gguf_tensors(path: Path) -> dict[str, GgufTensor]:
    """Return the file's tensors by the names of a Hugging Face folder; a tensor without such a name keeps its own.

    The divisors of rotary frequencies, which are not weights, are left out.
    """
    file = read_head(path)
    heads = file.sizes["attention.head_count"]
    permuted = {"attn_q": heads, "attn_k": file.sizes.get("attention.head_count_kv", heads)}
    tensors = {}
    for place in file.places.values():
        if place.name not in (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS):
            found = IN_A_LAYER.fullmatch(place.name)
            num_heads = permuted.get(found["kind"]) if found and file.architecture in PERMUTED else None
            tensors[_usual_name(place.name)] = GgufTensor(file, place, num_heads)
    return tensors


def quantizations(path: Path) -> list[str]:
    """Return the quantization types of the file's weights, the one with the most weights first."""
    from gguf import GGMLQuantizationType

    sizes: dict[str, int] = {}
    for place in read_head(path).places.values():
        name = GGMLQuantizationType(place.code).name
        sizes[name] = sizes.get(name, 0) + prod(place.shape)
    return sorted(sizes, key=lambda name: -sizes[name])


def _usual_name(name: str) -> str:
    if (found := IN_A_LAYER.fullmatch(name)) is None or found["kind"] not in IN_LAYER:
        return OUTSIDE.get(name, name)
    return f"model.layers.{found['layer']}.{IN_LAYER[found['kind']]}.{found['last']}"
