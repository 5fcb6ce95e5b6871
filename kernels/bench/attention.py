"""Times the paged attention kernel on a GPU, and compares it with torch's SDPA and with the bytes that have to move.

    PYTHONPATH=.:kernels python kernels/bench/attention.py [--batch 1 16 64] [--keys 512 4096] [--rows 1 4]
        [--tree] [--fp8]

Lower bound: with few query rows per request, attention reads the keys and values in reach once and does little
arithmetic. So the bound is `2 * keys * num_kv_heads * head_dim * bytes` per request, divided by the memory bandwidth
(about 4.2 TB/s on an H200). One request has only `num_kv_heads` independent pieces, far fewer than the GPU has
multiprocessors, so the keys are split to use them all. Splitting costs a second kernel, and the writing and reading of
partial results: `splits * rows * num_heads * (head_dim + 2)` floats. With few keys none of these bytes shows in the
time: two dependent kernels in a CUDA graph take some microseconds however little they read. The partial results mostly
stay in L2, so the printed bound leaves them out. If requests and heads alone fill the GPU, a program takes all splits
of its rows. With many rows, as a prompt's chunk has, the bound is the number of operations divided by the rate of the
tensor cores: an H200 multiplies large bf16 matrices at about 790 TFLOP/s. The printed bound is the longer of both:

    python kernels/bench/attention.py --batch 1 --keys 2048 8192 32768 --rows 2048

Times are for one launch inside a CUDA graph of many, which cycles through up to 64 caches. Together these exceed L2
from about 1 MB a cache on, so that keys are not read from L2. SDPA gets keys and values that are already contiguous, so
its time does not include gathering them from pages; it reads the same number of bytes. With `--fp8` the last columns
are the kernel over keys and values in e4m3, and this time over that in bfloat16:

    python kernels/bench/attention.py --fp8 --batch 8 --keys 64000 --rows 1 4
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from figures import Figure, options_of, write_figures

from spec_kernels.attention import paged_attention
from spec_kernels.attention_tiles import choose_split_keys
from spec_kernels.narrow_kv_reference import narrowed

BANDWIDTH, RATE = 4.2e12, 790e12
L2_BYTES = 60e6
LAUNCHES, REPEATS = 64, 20


@dataclass(frozen=True)
class Shape:
    """One measurement: `batch` requests of `keys` keys and `rows` query rows each."""

    batch: int
    keys: int
    rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    window: int | None

    @property
    def kv_bytes(self) -> int:
        """Return how many bytes of bfloat16 keys and values have to be read."""
        seen = self.keys if self.window is None else min(self.keys, self.window + self.rows - 1)
        return self.batch * seen * 2 * self.num_kv_heads * self.head_dim * 2

    @property
    def flops(self) -> int:
        """Return the number of operations of the two products of every query row with the keys that it sees."""
        unseen = self.rows * (self.rows - 1) // 2
        seen = self.rows * self.keys - unseen if self.window is None else self.rows * min(self.keys, self.window)
        return 4 * self.batch * self.num_heads * seen * self.head_dim

    @property
    def floor_us(self) -> float:
        """Return the longer of the times for bytes and for operations."""
        return max(self.kv_bytes / BANDWIDTH, self.flops / RATE) * 1e6

    def __str__(self) -> str:
        window = "" if self.window is None else f", window {self.window}"
        return f"batch {self.batch}, {self.keys} keys, {self.rows} rows{window}"


def microseconds(launch: Callable[[int], object]) -> float:
    """Return the median time of one `launch(i)` in a CUDA graph of LAUNCHES of them."""
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(LAUNCHES):
            launch(index)
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / LAUNCHES)
    return sorted(times)[len(times) // 2]


def num_copies(num_bytes: float) -> int:
    """Return how many copies of so many bytes to cycle through: enough to exceed L2 twice, but at most LAUNCHES."""
    return min(LAUNCHES, 1 + int(2 * L2_BYTES / num_bytes))


def shuffled_pages(batch: int, keys: int, page_size: int) -> tuple[torch.Tensor, int]:
    """Return the page table of requests with so many keys, and the number of cache slots."""
    columns = -(-keys // page_size)
    pages = torch.randperm(batch * columns, device="cuda").view(batch, columns) + 2
    return torch.cat((pages, torch.ones_like(pages[:, :1])), dim=1), (batch * columns + 2) * page_size


def binary_tree(shape: Shape, page_table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Make a tree of the newest keys in which each row has two children: row 0 is the parent of 1 and 2, and so on."""
    paths = [[0]]
    for row in range(1, shape.rows):
        paths.append([*paths[(row - 1) // 2], row])
    depths = torch.tensor([len(path) - 1 for path in paths], device="cuda").expand(shape.batch, -1).contiguous()
    table = torch.zeros((shape.rows, len(paths[-1])), dtype=torch.int64, device="cuda")
    for row, path in enumerate(paths):
        table[row, : len(path)] = torch.tensor(path)
    places = shape.keys - shape.rows + table.flatten().expand(shape.batch, -1)
    slots = page_table.gather(1, places // shape.page_size) * shape.page_size + places % shape.page_size
    return slots.view(shape.batch, *table.shape), depths, shape.rows


def kernel_time(shape: Shape, split_keys: int, of_tree: bool = False, is_narrow: bool = False) -> float:
    """Time the kernel for rows of a chain, or of a tree, over keys in bfloat16 or e4m3."""
    page_table, num_slots = shuffled_pages(shape.batch, shape.keys, shape.page_size)
    caches: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    for _ in range(num_copies(shape.kv_bytes)):
        kv = torch.randn(num_slots, 2, shape.num_kv_heads, shape.head_dim, device="cuda", dtype=torch.bfloat16)
        caches.append(narrowed(kv) if is_narrow else (kv, None))
    num_rows = shape.batch * shape.rows
    queries = torch.randn(num_rows, shape.num_heads, shape.head_dim, device="cuda", dtype=torch.bfloat16)
    seq_lens = torch.full((shape.batch,), shape.keys, device="cuda")
    tree = binary_tree(shape, page_table) if of_tree else ()

    def launch(index: int) -> torch.Tensor:
        kv, powers = caches[index % len(caches)]
        return paged_attention(
            queries,
            kv,
            page_table,
            seq_lens,
            shape.page_size,
            shape.keys,
            split_keys,
            shape.head_dim**-0.5,
            shape.window,
            *tree,
            powers=powers,
        )

    return microseconds(launch)


def sdpa_time(shape: Shape) -> float:
    """Time SDPA. The query heads that share a KV head are rows of one product, the mask is causal (and windowed), and
    keys and values are contiguous.
    """
    group = shape.num_heads // shape.num_kv_heads
    kv_shape = (num_copies(shape.kv_bytes), 2, shape.batch, shape.num_kv_heads, shape.keys, shape.head_dim)
    kv = torch.randn(kv_shape, device="cuda", dtype=torch.bfloat16)
    heads = (shape.batch, shape.num_kv_heads, group * shape.rows, shape.head_dim)
    queries = torch.randn(heads, device="cuda", dtype=torch.bfloat16)
    positions = torch.arange(shape.keys, device="cuda")
    ends = (shape.keys - torch.arange(shape.rows - 1, -1, -1, device="cuda")).repeat(group).unsqueeze(1)
    visible = positions < ends
    if shape.window is not None:
        visible &= positions >= ends - shape.window
    mask = torch.zeros(visible.shape, device="cuda", dtype=torch.bfloat16).masked_fill_(~visible, float("-inf"))

    def launch(index: int) -> torch.Tensor:
        keys, values = kv[index % len(kv)]
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask.expand(*heads[:2], -1, -1))

    return microseconds(launch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("batch", [1, 16, 64]), ("keys", [512, 1024, 4096]), ("rows", [1, 4, 8])):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=default)
    parser.add_argument("--split-keys", type=int, nargs="+", help="keys in a split, to try; default: chosen for --keys")
    for name, default in (("num-heads", 32), ("num-kv-heads", 8), ("head-dim", 128), ("page-size", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--window", type=int)
    parser.add_argument("--tree", action="store_true", help="time rows of a binary tree too, in a last column")
    parser.add_argument("--fp8", action="store_true", help="time keys and values in e4m3 too, in last columns")
    options = options_of(parser)
    torch.backends.cuda.enable_cudnn_sdp(False)  # plans anew for every shape
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, medians of {REPEATS} replays")
    print(
        "batch   keys  rows  split   kernel us    sdpa us   floor us   of floor"
        + "    tree us" * options.tree
        + "     fp8 us    to bf16" * options.fp8
    )
    figures = []
    for batch, keys, rows in itertools.product(options.batch, options.keys, options.rows):
        shape = Shape(
            batch,
            keys,
            rows,
            options.num_heads,
            options.num_kv_heads,
            options.head_dim,
            options.page_size,
            options.window,
        )
        floor, sdpa = shape.floor_us, sdpa_time(shape)
        for split_keys in options.split_keys or [choose_split_keys(keys, 2)]:
            kernel = kernel_time(shape, split_keys)
            cells = f"{kernel:11.2f}{sdpa:11.2f}{floor:11.2f}{floor / kernel:11.0%}"
            tree = f"{kernel_time(shape, split_keys, of_tree=True):11.2f}" if options.tree else ""
            if options.fp8:
                narrow = kernel_time(shape, -(-split_keys // 128) * 128, is_narrow=True)
                tree += f"{narrow:11.2f}{narrow / kernel:11.2f}"
            print(f"{batch:5}{keys:7}{rows:6}{split_keys:7} {cells}{tree}")
            figures.append(Figure("paged attention", str(shape), shape.kv_bytes, shape.flops, kernel, sdpa))
    write_figures(options.csv, figures)


if __name__ == "__main__":
    main()
