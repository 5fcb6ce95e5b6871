"""Identifies the model of a run, so that records can be matched with what made them."""

from __future__ import annotations

import hashlib
from pathlib import Path

SUFFIXES = (".json", ".safetensors", ".gguf", ".jinja", ".model")
ENDS = 2**20
"""Bytes at either end of a file that are read: all of a small file, the header and the last tensors of a large one."""


def digest_of(checkpoint: Path, random_seed: int | None = None) -> str:
    """Return twelve digits (SHA-256) of a checkpoint's folder or file: the name, the size and the ends of each file
    that a model is read from.

    Args:
        random_seed: the seed of random weights; then the files give only the shape.
    """
    files = [checkpoint] if checkpoint.is_file() else sorted(p for p in checkpoint.iterdir() if p.suffix in SUFFIXES)
    digest = hashlib.sha256(f"{random_seed}".encode())
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(ENDS))
            file.seek(max(ENDS, size - ENDS))
            digest.update(file.read(ENDS))
    return digest.hexdigest()[:12]
