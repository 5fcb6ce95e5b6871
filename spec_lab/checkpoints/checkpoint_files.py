"""The files of a checkpoint folder, single or sharded, and where each tensor is in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from spec_lab.checkpoints.checks import refuse_lfs_pointer
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
        dtype: the safetensors code, such as BF16; for a stack, that of its first piece.
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


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint: the single one, or those that the index names."""
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    weight_map = read_json(folder / INDEX_FILE)["weight_map"]
    return [folder / file for file in dict.fromkeys(weight_map.values())]


def tensors_of(file: Path) -> dict[str, StoredTensor]:
    """Return every tensor of one file, from its header."""
    tensors: dict[str, StoredTensor] = {}
    with opened(file) as handle:
        for name in sorted(handle.keys()):
            part = handle.get_slice(name)
            tensors[name] = StoredTensor(file, name, tuple(part.get_shape()), part.get_dtype())
    return tensors


def opened(file: Path) -> safe_open:
    """Open the file; its tensors are read on access."""
    refuse_lfs_pointer(file)
    return safe_open(file, framework="pt", device="cpu")


def few(names: Iterable[str], limit: int = 4) -> str:
    """Return the first few names and how many more there are, for an error message."""
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more
