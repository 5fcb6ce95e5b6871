"""The files of a checkpoint folder, single or sharded, and where each tensor is in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from spec_lab.checkpoints.json_input import ConfigFields, read_json, shown
from spec_lab.checkpoints.quantization import Block
from spec_lab.checkpoints.slices import Part
from spec_lab.core.errors import UserError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER, CONSOLIDATED = "adapter_", "consolidated"


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
    form: Callable[[torch.Tensor], torch.Tensor] | None = None
    in_float32: bool = False
    as_stored: bool = False


@dataclass(frozen=True, slots=True)
class BlockScales:
    """The place of the scales of an fp8 matrix, one for each block of `block` rows and columns."""

    tensor: StoredTensor
    block: Block


def checkpoint_files(folder: Path) -> dict[Path, list[str]]:
    """Return the files of a checkpoint, each with the tensor names that the index lists for it (none for a single
    file)."""
    if (folder / SINGLE_FILE).exists():
        return {folder / SINGLE_FILE: []}
    index = folder / INDEX_FILE
    if not index.exists():
        raise UserError(_no_weights(folder))
    weight_map = ConfigFields(read_json(index), str(index)).object("weight_map")
    if not weight_map:
        raise UserError(f"{index}: has no weight_map; fetch the file again")
    files: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", "..") or "\0" in file:
            raise UserError(
                f"{index}: weight_map must name plain files in its folder, not {shown(file)}; fetch it again"
            )
        files.setdefault(folder / file, []).append(name)
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise UserError(f"{index}: names shards that are missing ({few(missing)}); fetch them into {folder}")
    return files


def _no_weights(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: no such folder; give one with config.json and {SINGLE_FILE}"
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    pickled = sorted(file.name for file in folder.glob("pytorch_model*.bin"))
    if pickled and not others:
        return (
            f"{folder}: has its weights in {few(pickled)} only; convert them to {SINGLE_FILE} (torch.load(..., "
            "weights_only=True), then safetensors.torch.save_file)"
        )
    if any(name.startswith(ADAPTER) for name in others):
        return f"{folder}: holds an adapter ({few(others)}) but no model; merge it into its model, as peft does"
    if others and all(name.startswith(CONSOLIDATED) for name in others):
        return f"{folder}: has only {few(others)}, in its publisher's format; fetch {SINGLE_FILE} or {INDEX_FILE}"
    if others:
        return f"{folder}: has {few(others)}, not {SINGLE_FILE} or {INDEX_FILE}; rename the file or fetch the index"
    return f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}; fetch the weights in safetensors format"


def tensors_of(file: Path) -> dict[str, StoredTensor]:
    """Return every tensor of one file, from its header."""
    tensors: dict[str, StoredTensor] = {}
    with opened(file) as handle:
        for name in sorted(handle.keys()):
            if not name.isprintable():
                raise _unreadable(file, f"it names a tensor {shown(name)}")
            part = handle.get_slice(name)
            tensors[name] = StoredTensor(file, name, tuple(part.get_shape()), part.get_dtype())
    return tensors


def opened(file: Path) -> safe_open:
    """Open the file; its tensors are read on access."""
    try:
        file.open("rb").close()
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise _unreadable(file, " ".join(str(error).split())) from error


def _unreadable(file: Path, reason: str) -> UserError:
    return UserError(f"{file}: truncated, corrupt or not a safetensors file ({reason}); fetch it again")


def few(names: Iterable[str], limit: int = 4) -> str:
    """Return the first few names and how many more there are, for an error message."""
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more
