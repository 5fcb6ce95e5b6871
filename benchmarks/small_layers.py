"""Times the layers of small models on one GPU, as a decode round launches them: microseconds a layer, in one graph.

    PYTHONPATH=.:kernels python benchmarks/small_layers.py [--shapes 30,576,1536,9,3,64 ...] [--keys 300]

A shape is layers, hidden size, MLP width, query heads, KV heads and channels of a head. Cells are batch x rows a
request. Each shape has three lines. In `steps` products load their weights step by step, as those of large weights do,
and each kernel starts after the one before. In `steps, early` kernels start early (`spec_kernels.early`). In `at once,
early` products also load small weights at once, as in rounds of small models.
"""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from spec_kernels import product as products
from spec_kernels import project_heads as heads
from spec_kernels.attention import paged_attention
from spec_kernels.attention_tiles import choose_split_keys
from spec_kernels.early import early_launches
from spec_kernels.product_tiles import choose_tiles, tiles_of_product

SHAPES = (
    *("30,576,1536,9,3,64", "8,256,768,4,2,64", "28,1024,3072,16,8,128"),
    *("24,896,4864,14,2,64", "16,2048,8192,32,8,64"),
)
CELLS = ((1, 1), (1, 4), (4, 4), (16, 1))
PAGE_SIZE, MAX_POSITIONS, REPEATS = 16, 1024, 60
OPTIONS = {"device": "cuda", "dtype": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Shape:
    num_layers: int
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def weights(self) -> dict[str, tuple[int, int]]:
        """Return outputs and inputs of each product of a layer."""
        attended = self.num_heads * self.head_dim
        qkv = attended + 2 * self.num_kv_heads * self.head_dim
        sizes = {"qkv": (qkv, self.hidden), "o": (self.hidden, attended)}
        return sizes | {"gate_up": (2 * self.inner, self.hidden), "down": (self.hidden, self.inner)}


class Layers:
    """Random layers of a shape, one after the other, each with its own cache."""

    def __init__(self, shape: Shape, num_keys: int) -> None:
        self.shape, self.num_keys = shape, num_keys
        sizes, num_slots = shape.weights(), 16 * MAX_POSITIONS
        self._weights = [
            {name: torch.randn(size, **OPTIONS) * size[1] ** -0.5 for name, size in sizes.items()}
            for _ in range(shape.num_layers)
        ]
        cache = num_slots, 2, shape.num_kv_heads, shape.head_dim
        self._caches = [torch.randn(cache, **OPTIONS) for _ in self._weights]
        self._norm = torch.ones(shape.hidden, device="cuda")
        self._arrivals = torch.zeros(2 * shape.inner + 4096, dtype=torch.int32, device="cuda")

    def run(self, stream: torch.Tensor, batch: int) -> torch.Tensor:
        """Run all layers over `stream` [rows, hidden] of `batch` requests."""
        shape, num_rows = self.shape, len(stream) // batch
        pages = torch.arange(batch * MAX_POSITIONS // PAGE_SIZE, device="cuda").view(batch, -1)
        table = torch.cat((pages, pages[:, :1]), dim=1)
        lens = torch.full((batch,), self.num_keys, device="cuda")
        positions = torch.arange(self.num_keys - num_rows, self.num_keys, device="cuda")
        slots = (torch.arange(batch, device="cuda")[:, None] * MAX_POSITIONS + positions).flatten()
        turns = torch.ones(len(stream), shape.head_dim, **OPTIONS)
        split_keys = choose_split_keys(MAX_POSITIONS)
        for weights, kv in zip(self._weights, self._caches, strict=True):
            queries = stream.new_empty(len(stream), shape.num_heads, shape.head_dim)
            mixed = stream.new_empty(len(stream), shape.num_heads * shape.head_dim)
            inner = stream.new_empty(len(stream), shape.inner)
            middle, out = torch.empty_like(stream), torch.empty_like(stream)
            normed, plain, counts = (None, self._norm, 1e-5), (None, None, 0.0), self._arrivals
            heads.project_heads(queries, kv, stream, weights["qkv"], counts, *normed, turns, turns, slots)
            paged_attention(
                mixed, queries, kv, table, lens, PAGE_SIZE, MAX_POSITIONS, split_keys, shape.head_dim**-0.5, None
            )
            products.product(middle, mixed, weights["o"], counts, *plain, stream, False)
            products.product(inner, middle, weights["gate_up"], counts, *normed, None, True)
            products.product(out, inner, weights["down"], counts, *plain, middle, False)
            stream = out
        return stream

    def microseconds(self, batch: int, num_rows: int, launching: AbstractContextManager[None]) -> float:
        """Return the time of a layer, in the fastest of three stretches of replays."""
        stream = torch.randn(batch * num_rows, self.shape.hidden, **OPTIONS)
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(side), launching:
            self.run(stream, batch)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=side):
                self.run(stream, batch)
        return min(elapsed_ms(graph) for _ in range(3)) * 1e3 / REPEATS / self.shape.num_layers


def elapsed_ms(graph: torch.cuda.CUDAGraph) -> float:
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(REPEATS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def step_by_step(*sizes: int) -> object:
    """Return the tiles of a product that loads its weight step by step, whatever its size."""
    rows, out_features, in_features, gated, _, is_fp8 = sizes
    return choose_tiles(rows, out_features, in_features, bool(gated), bool(is_fp8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="*", default=SHAPES)
    parser.add_argument("--keys", type=int, default=300)
    options = parser.parse_args()
    print("batch x rows:", *(f"{batch} x {rows}" for batch, rows in CELLS))
    for text in options.shapes:
        shape = Shape(*map(int, text.split(",")))
        num_bytes = 2 * sum(out_features * in_features for out_features, in_features in shape.weights().values())
        print(f"{text}: {num_bytes / 1e6:.1f} MB a layer, {num_bytes / 4.2e6:.2f} us at 4.2 TB/s")
        layers = Layers(shape, options.keys)
        for name, tiles, is_early in (
            ("steps", step_by_step, False),
            ("steps, early", step_by_step, True),
            ("at once, early", tiles_of_product, True),
        ):
            products.tiles_of_product = heads.tiles_of_product = tiles  # type: ignore[assignment]
            times = (layers.microseconds(*cell, early_launches() if is_early else nullcontext()) for cell in CELLS)
            print(f"  {name:15}", *(f"{time:6.2f}" for time in times))


if __name__ == "__main__":
    main()
