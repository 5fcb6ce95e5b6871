"""The files of a checkpoint, single or sharded safetensors or one GGUF, and where each tensor is in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Self

import torch
from safetensors import safe_open

from spec_lab.checkpoints.checks import refuse_lfs_pointer
from spec_lab.checkpoints.gguf_file import is_gguf, read_head
from spec_lab.checkpoints.json_input import read_json
from spec_lab.checkpoints.quantization import Block
from spec_lab.checkpoints.slices import Part

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The place of a tensor on disk.

    Attributes:
        shape: shape of the whole tensor, as it is checked against the model's: after `form`. That of block scales is
            before `form`.
        dtype: the safetensors code, such as BF16; for a stack, that of its first piece; for GGUF what is read, F32.
        part: the part of it that is read; None is all.
        stack: the tensors that it is made of, if the file has separate ones for each expert. An expert's tensors are
            concatenated by rows, and the experts are stacked.
        scales: the block scales of an fp8 matrix; None for a tensor without scales.
        packed: the parts of a quantised matrix, whose names `name` and `file` are not; None for other tensors.
        form: a function that is applied after reading; None if there is none.
        in_float32: whether the result is float32, whatever the run's dtype.
        as_stored: whether it keeps the file's dtype.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    part: Part | None = None
    stack: tuple[tuple[StoredTensor, ...], ...] = ()
    scales: BlockScales | None = None
    packed: Packed | None = None
    form: Callable[[torch.Tensor], torch.Tensor] | None = None
    in_float32: bool = False
    as_stored: bool = False


@dataclass(frozen=True, slots=True)
class BlockScales:
    """The place of the scales of an fp8 matrix, one for each block of `block` rows and columns."""

    tensor: StoredTensor
    block: Block


@dataclass(frozen=True, slots=True)
class Packed:
    """A quantised matrix: its parts, by the ends of their names, and the function that makes the matrix of them."""

    parts: Mapping[str, StoredTensor]
    widen: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]

    def read(self) -> torch.Tensor:
        """Read the parts, which an index may have placed in several files, and widen them."""
        values = {}
        for part, tensor in self.parts.items():
            with opened(tensor.file) as handle:
                values[part] = handle.get_tensor(tensor.name)
        return self.widen(values)


class OpenedGguf:
    """Reads a GGUF file's tensors as `safe_open` does, each dequantised to float32 by the library."""

    def __init__(self, path: Path) -> None:
        self._head = read_head(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """Nothing is open between two reads."""

    def get_tensor(self, name: str) -> torch.Tensor:
        import numpy as np
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        place = self._head.places[name]
        kind = GGMLQuantizationType(place.code)
        numbers, num_bytes = GGML_QUANT_SIZES[kind]
        width = place.shape[-1] // numbers * num_bytes
        with self._head.path.open("rb") as source:
            source.seek(self._head.data_start + place.offset)
            taken = bytearray(source.read(prod(place.shape[:-1]) * width))
        wide = dequantize(np.frombuffer(taken, dtype=np.uint8).reshape(-1, width), kind)
        return torch.from_numpy(np.ascontiguousarray(wide, dtype=np.float32)).view(place.shape)

    get_slice = get_tensor


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint: the single one, or those that the index names."""
    if is_gguf(folder):
        return [folder]
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    weight_map = read_json(folder / INDEX_FILE)["weight_map"]
    return [folder / file for file in dict.fromkeys(weight_map.values())]


def tensors_of(file: Path) -> dict[str, StoredTensor]:
    """Return every tensor of one file, from its header."""
    if is_gguf(file):
        return {name: StoredTensor(file, name, place.shape, "F32") for name, place in read_head(file).places.items()}
    tensors: dict[str, StoredTensor] = {}
    refuse_lfs_pointer(file)
    with safe_open(file, framework="pt", device="cpu") as handle:
        for name in sorted(handle.keys()):
            part = handle.get_slice(name)
            tensors[name] = StoredTensor(file, name, tuple(part.get_shape()), part.get_dtype())
    return tensors


def opened(file: Path) -> safe_open | OpenedGguf:
    """Open the file; its tensors are read on access."""
    if is_gguf(file):
        return OpenedGguf(file)
    refuse_lfs_pointer(file)
    return safe_open(file, framework="pt", device="cpu")


def few(names: Iterable[str], limit: int = 4) -> str:
    """Return the first few names and how many more there are, for an error message."""
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more
