"""Stores a drafter's large matrices in e4m3 (8 bits) with a scale for each block, like fp8 checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from spec_kernels.block_fp8_reference import BLOCK_SIZE
from spec_lab.checkpoints.checkpoint_files import INDEX_FILE
from spec_lab.checkpoints.config import read_config_json
from spec_lab.checkpoints.keep_fp8 import narrowed_in_blocks
from spec_lab.checkpoints.quantization import SCALES_SUFFIX
from spec_lab.core.errors import UserError
from spec_lab.train.checkpoint import WEIGHTS, load_weights, save_config, save_weights

KEY = "quantization_config"
ASSISTANT = "gemma4_assistant"
SCHEME = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK_SIZE, BLOCK_SIZE]}
LEAST_SIDE = 32
"""The smallest side of a matrix that is narrowed; smaller matrices, such as a confidence head, take few bytes."""


def store_in_fp8(folder: Path, output: Path | None = None) -> None:
    """Write the checkpoint in `folder` with e4m3 matrices to `output`, or in place; readers widen them.

    Norms, biases, small matrices, convolutions and vocabulary maps are not changed. Old files are replaced only once
    all is written.

    Raises:
        UserError: there is no checkpoint; its matrices are already in 8 bits; its reader does not support 8 bits; or
            `output` holds something else.
        Breakdown: the disk is full.
    """
    config = read_config_json(folder, "FOLDER")
    if KEY in config:
        raise UserError(f"{folder}: its config.json already has a {KEY}; take the checkpoint in bfloat16")
    if config.get("model_type") == ASSISTANT:
        raise UserError(f"{folder}: an assistant of Gemma 4 is read only in 16 or 32 bits; leave it unchanged")
    wide = load_weights(folder)
    if narrow := [name for name, tensor in wide.items() if tensor.element_size() == 1 and tensor.is_floating_point()]:
        raise UserError(f"{folder}: {narrow[0]} is already in 8 bits; take the checkpoint in bfloat16")
    tensors = with_narrow_matrices(wide)
    output = output or folder
    if output.exists() and not output.samefile(folder) and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} is not empty; name a new folder, or {folder} itself")
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output, prefix=".narrow-") as beside:
        unfinished = Path(beside)
        save_weights(tensors, unfinished)
        save_config({**config, KEY: SCHEME}, unfinished)
        written = {file.name for file in unfinished.iterdir()}
        for name in sorted(written):
            (unfinished / name).replace(output / name)
        for file in (*output.glob(WEIGHTS), output / INDEX_FILE):  # there may be fewer files now
            if file.name not in written:
                file.unlink(missing_ok=True)


def with_narrow_matrices(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert every large enough matrix to e4m3, and add its scales."""
    result = dict(tensors)
    for name, tensor in tensors.items():
        if is_narrowed(name, tensor):
            result[name], result[f"{name}{SCALES_SUFFIX}"] = narrowed_in_blocks(tensor)
    return result


def is_narrowed(name: str, tensor: Tensor) -> bool:
    """Return whether a tensor is a large matrix that does not belong to a convolution."""
    is_matrix = tensor.is_floating_point() and tensor.ndim == 2 and min(tensor.shape) >= LEAST_SIDE
    return is_matrix and "_conv." not in name


def stored_words(folder: Path) -> str:
    """Say for a card how the weights in a folder are stored."""
    is_narrow = KEY in read_config_json(folder, "FOLDER")
    return "in e4m3 with a scale for each block of 128 x 128" if is_narrow else "in bf16"
