"""A digest of a target's files, by which texts that it wrote are known to be its own."""

from __future__ import annotations

import hashlib
from pathlib import Path

from spec_lab.checkpoints.gguf_file import is_gguf

NUM_BLOCKS, BLOCK = 64, 2**16


def target_digest(path: Path, random_seed: int | None = None) -> str:
    """Return twelve digits of a target's configuration and weights.

    Only parts of the weights are read, since all may take minutes: each file's size, and 64 evenly spread blocks of
    64 KiB. With random weights, whose seed is `random_seed`, the files only give the shape.
    """
    files = [path] if is_gguf(path) else [path / "config.json", *sorted(path.glob("*.safetensors"))]
    digest = hashlib.sha256(b"" if random_seed is None else str(random_seed).encode())
    for file in files:
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            digest.update(str(size).encode())
            for place in range(NUM_BLOCKS):
                opened.seek(max(0, size - BLOCK) * place // (NUM_BLOCKS - 1))
                digest.update(opened.read(BLOCK))
    return digest.hexdigest()[:12]
