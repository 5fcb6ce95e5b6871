"""The files of a checkpoint, single or sharded safetensors or one GGUF, and where each tensor is in them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from spec_lab.checkpoints.json_input import read_json
from spec_lab.checkpoints.plan import LayerPlan

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

Part = tuple[slice, ...]
"""The rows, or rows and columns, of a tensor that are kept."""


class Slices:
    """Says which share of a decoder one process reads: here all of it."""

    __slots__ = ()

    def share(self, plan: LayerPlan) -> LayerPlan:
        """Return the plan of this process's share of a layer, from which its KV cache follows too."""
        return plan

    def part(self, name: str, shape: tuple[int, ...]) -> Part | None:
        """Return the part of the tensor that a checkpoint calls `name`; None if every process has all of it."""
        return None


WHOLE_TENSORS = Slices()


class LazyTensors(Mapping[str, torch.Tensor]):
    """Reads a tensor on every access and keeps none. So weights are in memory only once while a model converts their
    layout."""

    def __init__(self, names: Collection[str], read: Callable[[str], torch.Tensor]) -> None:
        self._names = {name: name for name in names}
        self._read = read

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._read(self._names[name])

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def kept_part(slices: Slices, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a whole tensor. A smaller part is copied, so that the whole tensor can be
    freed."""
    part = slices.part(name, tuple(tensor.shape))
    return tensor if part is None else tensor[part].clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint: one of a file, or what a function makes of such tensors when it is read.

    Attributes:
        file: its file, or that of its first part; so is `name`.
        shape: shape of the whole tensor, as it is checked against the model's.
        dtype: the safetensors code of what is read, such as BF16; for GGUF F32; for a stack, that of its first piece.
        parts: the tensors of which `form` makes this one; without a form it is read as it is.
        part: the part of it that is read; None is all.
        stack: the tensors that it is made of, if the file has separate ones for each expert. An expert's tensors are
            concatenated by rows, and the experts are stacked.
        kept: its dtype, whatever the run's; None for the run's.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[StoredTensor, ...] = ()
    form: Callable[..., torch.Tensor] | None = None
    part: Part | None = None
    stack: tuple[tuple[StoredTensor, ...], ...] = ()
    kept: torch.dtype | None = None

    def made(self, form: Callable[..., torch.Tensor], *others: StoredTensor, **changes: Any) -> StoredTensor:
        """Return the tensor that `form` makes of this one and others. Its shape follows if `changes` has none."""
        parts = (self, *others)
        shape = changes.pop("shape", None) or form(*(torch.empty(part.shape, device="meta") for part in parts)).shape
        return replace(self, parts=parts, form=form, shape=tuple(shape), **changes)

    def read(self, opened_file: Callable[[Path], Any]) -> torch.Tensor:
        """Read the tensor, or its part. A stack has none here: its pieces are cast first."""
        if self.form is not None:
            value = self.form(*(part.read(opened_file) for part in self.parts))
            return value if self.part is None else value[self.part]
        file = opened_file(self.file)
        whole: torch.Tensor = file.get_slice(self.name)[self.part] if self.part else file.get_tensor(self.name)
        return whole


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint: the single one, or those that the index names."""
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    weight_map = read_json(folder / INDEX_FILE)["weight_map"]
    return [folder / file for file in dict.fromkeys(weight_map.values())]


def tensors_of(file: Path) -> dict[str, StoredTensor]:
    """Return every tensor of one file, from its header."""
    tensors: dict[str, StoredTensor] = {}
    with safe_open(file, framework="pt", device="cpu") as handle:
        for name in sorted(handle.keys()):
            part = handle.get_slice(name)
            tensors[name] = StoredTensor(file, name, tuple(part.get_shape()), part.get_dtype())
    return tensors
