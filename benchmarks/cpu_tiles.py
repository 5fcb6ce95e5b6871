"""Times a target's forward with products in tile registers (Intel AMX) and in vector registers, in turns.

    python benchmarks/cpu_tiles.py [target=pocket]

A forward of 32 rows has the products of 8 requests that verify 4 rows each, and less attention. Times are CPU times,
and ratios are of two measurements in a row, since other work on the machine lengthens both.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import quantiles
from unittest.mock import patch

from verify_rows import load_parts, seconds

from spec_kernels.native import compiled
from spec_kernels.native import parts as native_parts
from spec_lab.core.ending import ended
from spec_lab.record.wording import format_table

NUM_TURNS = 60
ROWS = (1, 4, 8, 16, 32, 64, 128)
CONTEXT = 160


def main() -> None:
    """Print a line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="of the run whose target is timed")
    overrides = parser.parse_args().overrides
    if not compiled.has_tiles():
        raise SystemExit("cpu_tiles.py: this machine has no tile registers, or its system or compiler gives none")
    targets = []
    for has_tiles in (False, True):
        with patch.object(native_parts, "has_tiles", lambda has_tiles=has_tiles: has_tiles):
            targets.append(load_parts([*overrides, "kernels=native"]))
    body = []
    for num_rows in ROWS:
        turns = [[seconds(parts, num_rows, CONTEXT, time.thread_time) for parts in targets] for _ in range(NUM_TURNS)]
        low, middle, high = quantiles([vectors / tiles for vectors, tiles in turns])
        least = [f"{1e3 * min(times):.2f}" for times in zip(*turns, strict=True)]
        body.append([str(num_rows), *least, f"{middle:.2f} ({low:.2f} to {high:.2f})"])
    print(format_table(["rows", "vectors, ms", "tiles, ms", "vectors over tiles"], body))


if __name__ == "__main__":
    sys.exit(ended(main))
