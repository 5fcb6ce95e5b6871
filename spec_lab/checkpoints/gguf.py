"""The tensors of a GGUF file with the names and row order of a Hugging Face folder, dequantised as they are read.

Names, and which rows are permuted, follow llama.cpp's `convert_hf_to_gguf.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
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
from spec_lab.core.errors import UserError

if TYPE_CHECKING:
    import torch

PERMUTED = ("llama",)
"""Architectures for which llama.cpp rotates neighbouring channels of a head rather than its two halves."""

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
        from gguf import GGMLQuantizationType, dequantize

        num_bytes, width = _bytes_of(self.file, self.place)
        try:
            with self.file.path.open("rb") as source:
                source.seek(self.file.data_start + self.place.offset)
                taken = bytearray(source.read(num_bytes))
        except OSError as error:
            raise UserError(f"{self.file.path}: cannot be read ({error.strerror}); fetch it again") from error
        if len(taken) < num_bytes:
            raise _cut_short(self.file, self.place)
        stored = np.frombuffer(taken, dtype=np.uint8).reshape(-1, width)
        wide = dequantize(stored, GGMLQuantizationType(self.place.code))
        return self._in_order(torch.from_numpy(np.ascontiguousarray(wide, dtype=np.float32)).view(self.shape))

    def _in_order(self, value: torch.Tensor) -> torch.Tensor:
        if self.num_heads is None:
            return value
        halves = value.view(self.num_heads, -1, 2, *value.shape[1:])
        return halves.transpose(1, 2).reshape(value.shape)


def gguf_tensors(path: Path) -> dict[str, GgufTensor]:
    """Return the file's tensors by the names of a Hugging Face folder; a tensor without such a name keeps its own.

    The divisors of rotary frequencies, which are not weights, are left out.

    Raises:
        UserError: the errors of `read_head`; a tensor is in an unsupported quantization, reaches past the end of the
            file, or has rows that do not fit the number of heads.
    """
    file = read_head(path)
    for place in file.places.values():
        num_bytes, _ = _bytes_of(file, place)
        if file.data_start + place.offset + num_bytes > file.num_bytes:
            raise _cut_short(file, place)
    name = file.text("general.architecture")
    heads = file.integer(f"{name}.attention.head_count")
    permuted = {"attn_q": heads, "attn_k": file.integer(f"{name}.attention.head_count_kv", heads)}
    tensors = {}
    for place in file.places.values():
        if place.name not in (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS):
            kind = _kind_in_layer(place.name)
            num_heads = permuted.get(kind) if name in PERMUTED else None
            if num_heads is not None and (num_heads < 1 or place.shape[0] % (2 * num_heads)):
                raise UserError(
                    f"{path}: {place.name} has {place.shape[0]} rows, which is not an even number for each of "
                    f"{num_heads} heads"
                )
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


def _kind_in_layer(name: str) -> str:
    parts = name.split(".")
    return parts[2] if len(parts) == 4 and parts[0] == "blk" else ""


def _usual_name(name: str) -> str:
    usual = IN_LAYER.get(_kind_in_layer(name))
    if usual is None:
        return OUTSIDE.get(name, name)
    _, layer, _, last = name.split(".")
    return f"model.layers.{layer}.{usual}.{last}"


def _bytes_of(file: GgufFile, place: TensorPlace) -> tuple[int, int]:
    """Return the number of bytes of a tensor, and of one of its rows."""
    block = _readable(place.code)
    if block is None:
        raise UserError(
            f"{file.path}: {place.name[:80]} has quantization {place.code}, which the gguf package cannot convert; use "
            "a file in Q4_K_M, Q8_0 or F16"
        )
    numbers, num_bytes = block
    if place.shape[-1] % numbers:
        raise UserError(
            f"{file.path}: {place.name[:80]} has rows of {place.shape[-1]}, which is not a multiple of its blocks of "
            f"{numbers}; fetch it again"
        )
    width = place.shape[-1] // numbers * num_bytes
    return prod(place.shape[:-1]) * width, width


@cache
def _readable(code: int) -> tuple[int, int] | None:
    """Return the number of weights in a block and of its bytes; None for an unsupported quantization."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    try:
        kind = GGMLQuantizationType(code)
        block = GGML_QUANT_SIZES[kind]
        dequantize(np.zeros((1, block[1]), dtype=np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        return None
    return block


def _cut_short(file: GgufFile, place: TensorPlace) -> UserError:
    return UserError(f"{file.path}: ends before the end of tensor {place.name[:80]}; fetch it again")
