"""Writes a drafter's checkpoint with its matrices in e4m3, 8 bits, as `drafter.stored_as=fp8` of a training does.

    python scripts/store_in_fp8.py FOLDER OUTPUT    # OUTPUT may be FOLDER

Norms, biases, convolutions and what is no weight stay as they are. Readers widen the matrices.
An assistant of Gemma 4 is refused, since its reader takes none.
"""

from __future__ import annotations

import sys
from pathlib import Path

from spec_lab.core.ending import ended
from spec_lab.core.errors import UserError
from spec_lab.train.narrow import store_in_fp8


def main(arguments: list[str]) -> None:
    """Convert one folder."""
    if len(arguments) != 2 or not all(arguments):
        raise UserError("give two folders: that of a checkpoint, and that to write")
    store_in_fp8(*map(Path, arguments))


if __name__ == "__main__":
    sys.exit(ended(lambda: main(sys.argv[1:])))
