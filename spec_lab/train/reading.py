"""Reads files that a training wrote, which may be incomplete after a full disk or a kill."""

from __future__ import annotations

import pickle
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from spec_lab.checkpoints.json_input import parse_json
from spec_lab.core.errors import UserError, is_out_of_memory

BROKEN = (
    *(
        OSError,
        EOFError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RuntimeError,
        pickle.UnpicklingError,
        SafetensorError,
    ),
    *(SyntaxError, tokenize.TokenError),  # numpy reads a header as Python
)
"""The exceptions of json, numpy, torch and safetensors for files that are truncated or hold something else."""


TRAIN_AGAIN = "delete it and what was made with it, and train again"


@contextmanager
def reading(file: Path, remedy: str = TRAIN_AGAIN) -> Iterator[None]:
    """Turn a library's exceptions about `file` into one line, without the library's message, which can be a page long.

    Raises:
        UserError: the block could not read it.
    """
    try:
        yield
    except UserError:
        raise
    except BROKEN as error:
        if is_out_of_memory(error):
            raise
        raise UserError(f"{file} cannot be read ({type(error).__name__}); {remedy}") from error


def refuse_damaged(folder: Path) -> None:
    """Raise UserError if a safetensors file in a folder is truncated, or a checkpoint has no config."""
    if any(folder.glob("model*.safetensors")) and not (folder / "config.json").exists():
        raise UserError(f"{folder} has no config.json; {TRAIN_AGAIN}")
    for file in sorted(folder.glob("*.safetensors")):
        with reading(file), safe_open(file, "pt"):
            pass


def read_record(file: Path) -> dict[str, Any]:
    """Read the record of a stage, whose `recipe` is an object.

    Raises:
        UserError: the file is not such a record.
    """
    with reading(file):
        record = parse_json(file.read_text(encoding="utf-8"))
        if not isinstance(record, dict) or not isinstance(record.get("recipe"), dict):
            raise TypeError("no record")
    return record
