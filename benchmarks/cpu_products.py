"""Times matrix products of a few rows on a CPU: with weights packed for oneDNN, as this project packs them, by
`F.linear`, and in C on one thread and on two.

    python benchmarks/cpu_products.py

There are as many weights of each shape as fit into 30 MB, the size of a pocket model, but at most 60. So they are read
from the same level of memory as in a round. The figure is the least of many turns. The last four shapes are those of
SmolLM2-135M.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from spec_kernels.native.compiled import use_threads
from spec_kernels.native.part_operators import multiply
from spec_kernels.native.parts import NativeProduct
from spec_lab.core.ending import ended
from spec_lab.models.linear import PackedLinear
from spec_lab.record.wording import format_table

NUM_TURNS = 30
ROWS = (1, 4)
NAMES = ("packed", "F.linear", "C", "C, 2 threads")
SHAPES = ((16, 16), (256, 256), (512, 256), (1024, 256), (1536, 256), (256, 768), (8192, 256))
SHAPES += ((960, 576), (3072, 576), (576, 1536), (49_152, 576))
NUM_BYTES = 30e6
MOST_WEIGHTS = 60


@torch.inference_mode()
def main() -> None:
    """Print a line for each shape, with four columns for each number of rows."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    header = [f"{rows} row{'s'[: rows > 1]}, {name}" for rows in ROWS for name in NAMES]
    print(format_table(["out x in", *header], [line(*shape) for shape in SHAPES]))


def line(out_features: int, in_features: int) -> list[str]:
    """Return the microseconds of a product of each kind."""
    count = max(1, min(MOST_WEIGHTS, int(NUM_BYTES / (4 * out_features * in_features))))
    weights = [torch.randn(out_features, in_features) for _ in range(count)]
    packed = [PackedLinear(weight, None) for weight in weights]
    native = [NativeProduct(weight) for weight in weights]
    cells = [f"{out_features} x {in_features}"]
    for num_rows in ROWS:
        rows = torch.randn(num_rows, in_features)
        cells.append(f"{least_microseconds([partial(product, rows) for product in packed]):.1f}")
        cells.append(f"{least_microseconds([partial(F.linear, rows, weight) for weight in weights]):.1f}")
        out = torch.empty(num_rows, out_features)
        for num_threads in (1, 2):
            use_threads(num_threads)
            in_c = [partial(multiply, out, rows, product.address) for product in native]
            cells.append(f"{least_microseconds(in_c):.1f}")
        use_threads(1)
    return cells


def least_microseconds(products: Sequence[Callable[[], object]]) -> float:
    """Return the mean time of one of `products`, in the fastest pass over all of them."""
    turns = []
    for _ in range(NUM_TURNS):
        started = time.perf_counter()
        for product in products:
            product()
        turns.append(time.perf_counter() - started)
    return 1e6 * min(turns) / len(products)


if __name__ == "__main__":
    sys.exit(ended(main))
