"""The path of an existing target: `target=hf`, or a model from a package. It does not import torch."""

from __future__ import annotations

from pathlib import Path

from spec_lab.checkpoints.gguf_file import is_gguf
from spec_lab.checkpoints.packaged import PACKAGED
from spec_lab.core.errors import UserError
from spec_lab.options.shipped import ZOO, missing_folder
from spec_lab.train.target_config import HfTarget, PocketTarget, SmolLm2Target

SMOLLM2 = "smollm2_135m"
SMOLLM2_SIZES = (576, 30, 49152)
"""SmolLM2's width, number of layers and vocabulary size."""


def needs_a_path(target: HfTarget) -> str | None:
    """Return a problem if no checkpoint is named, or the named one does not exist."""
    return (
        missing(target.path)
        if target.path
        else "target=hf needs a checkpoint; add target.path=FOLDER, or target.path=FILE.gguf"
    )


def package_is_here(target: SmolLm2Target) -> str | None:
    """Return a problem if the named checkpoint is missing or another model. If none is named, return one if the package
    is missing."""
    if target.path:
        return missing(target.path) or _another_model(target.path)
    found = PACKAGED[SMOLLM2].find()
    return None if found else f"target={SMOLLM2}: its package is not installed; {PACKAGED[SMOLLM2].command}"


def _another_model(path: str) -> str | None:
    """Return a problem if the file's sizes are not SmolLM2's, since the head would be named after SmolLM2."""
    from spec_lab.checkpoints.families.table import read_model_config

    config = read_model_config(Path(path))
    sizes = config.hidden_size, config.num_layers, config.vocab_size
    if sizes == SMOLLM2_SIZES:
        return None
    return f"target={SMOLLM2}: target.path={path} has another model; use target=hf target.path={path}"


def missing(path: str) -> str | None:
    """Return a problem if there is no such checkpoint."""
    if is_gguf(Path(path)):
        return None if Path(path).is_file() else f"target.path={path} is not a file; give the GGUF file of a model"
    return missing_folder("target.path", path)


def checkpoint_path(target: HfTarget) -> Path:
    """Return `target.path`. Raise UserError if there is none: checks ask for it even if `needs_a_path` has refused."""
    if target.path is None:
        raise UserError(needs_a_path(target))
    return Path(target.path)


def is_there(target: PocketTarget) -> str | None:
    """Return a problem if a named checkpoint does not exist."""
    return missing(target.path) if target.path else None


def shipped_path(target: PocketTarget) -> Path:
    """Return `target.path`, or else the shipped target."""
    return Path(target.path) if target.path else ZOO / "pocket"


def packaged_path(target: SmolLm2Target) -> Path:
    """Return `target.path`, or else the packaged file. Raise UserError if the package is missing, as in
    `checkpoint_path`."""
    found = Path(target.path) if target.path else PACKAGED[SMOLLM2].find()
    if found is None:
        raise UserError(package_is_here(target))
    return found
