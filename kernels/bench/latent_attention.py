"""Times the latent attention kernel on a GPU by query rows and context; compares it with its bytes and operations.

    PYTHONPATH=.:kernels python kernels/bench/latent_attention.py [--heads 20 128] [--keys 1024 8192] [--rows 1 4]

Lower bound: for each key one row of 1,152 bytes is read for all heads. It is multiplied with `heads * rows` queries of
576 channels, and its 512 values with as many attention weights: 1.89 operations per byte for each pair of query row and
head. So from about 100 pairs on, arithmetic is the bound rather than bytes (790 TFLOP/s over 4.2 TB/s), and the printed
bound is the longer of both times. If keys are split, each split writes and reads 2 kB for each pair, which the bound
leaves out.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from attention import BANDWIDTH, RATE, microseconds, num_copies, shuffled_pages
from figures import Figure, options_of, write_figures

from spec_kernels.attention_tiles import choose_latent_split_keys
from spec_kernels.latent_attention import latent_attention

RANK, ROW_WIDTH, PAGE_SIZE = 512, 576, 16


@dataclass(frozen=True)
class LatentShape:
    """One measurement: `batch` requests of `keys` keys and `rows` query rows each."""

    num_heads: int
    batch: int
    keys: int
    rows: int

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of the cache rows in bfloat16."""
        return self.batch * self.keys * ROW_WIDTH * 2

    @property
    def flops(self) -> int:
        """Return the number of operations of both products."""
        return 2 * self.batch * self.rows * self.num_heads * self.keys * (ROW_WIDTH + RANK)

    @property
    def floor_us(self) -> float:
        """Return the longer of the times for bytes and for operations."""
        return max(self.num_bytes / BANDWIDTH, self.flops / RATE) * 1e6

    def __str__(self) -> str:
        return f"{self.num_heads} heads, batch {self.batch}, {self.keys} keys, {self.rows} rows"


def randn(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, device="cuda", dtype=torch.bfloat16)


def kernel_time(shape: LatentShape, split_keys: int) -> float:
    page_table, num_slots = shuffled_pages(shape.batch, shape.keys, PAGE_SIZE)
    caches = randn(num_copies(shape.num_bytes), num_slots, ROW_WIDTH)
    queries = randn(shape.batch * shape.rows, shape.num_heads, ROW_WIDTH)
    seq_lens = torch.full((shape.batch,), shape.keys, device="cuda")

    def launch(index: int) -> torch.Tensor:
        cache = caches[index % len(caches)]
        shapes = PAGE_SIZE, shape.keys, split_keys, 0.05, None, RANK
        return latent_attention(queries, cache, page_table, seq_lens, *shapes)

    return microseconds(launch)


def sdpa_time(shape: LatentShape) -> float:
    """Time SDPA over rows that are already contiguous, with heads and query rows as rows of one product and no mask."""
    rows = randn(num_copies(shape.num_bytes), shape.batch, 1, shape.keys, ROW_WIDTH)
    queries = randn(shape.batch, 1, shape.num_heads * shape.rows, ROW_WIDTH)

    def launch(index: int) -> torch.Tensor:
        keys = rows[index % len(rows)]
        return F.scaled_dot_product_attention(queries, keys, keys[..., :RANK], scale=0.05)

    return microseconds(launch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("heads", [20, 128]), ("batch", [1, 16]), ("keys", [1024, 8192, 32_768])):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=default)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--split-keys", type=int, nargs="+", help="keys in a split, to try; default: chosen for --keys")
    options = options_of(parser)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, medians of replays")
    print("heads batch   keys  rows  split   kernel us     sdpa us    floor us    of floor  TFLOP/s")
    figures = []
    for sizes in itertools.product(options.heads, options.batch, options.keys, options.rows):
        shape = LatentShape(*sizes)
        sdpa = sdpa_time(shape)
        for split_keys in options.split_keys or [choose_latent_split_keys(shape.keys, shape.batch, shape.num_heads)]:
            kernel = kernel_time(shape, split_keys)
            floor = shape.floor_us
            cells = f"{kernel:12.1f}{sdpa:12.1f}{floor:12.1f}{floor / kernel:12.0%}{shape.flops / kernel / 1e6:9.0f}"
            print(f"{sizes[0]:5}{sizes[1]:6}{sizes[2]:7}{sizes[3]:6}{split_keys:7}{cells}", flush=True)
            figures.append(Figure("latent attention", str(shape), shape.num_bytes, shape.flops, kernel, sdpa))
    write_figures(options.csv, figures)


if __name__ == "__main__":
    main()
