"""Time of the products of few rows on a GPU, beside the library's, at the shapes of Llama-3.1-8B and an EAGLE-3 head.

    PYTHONPATH=.:kernels python kernels/bench/products.py [--rows 1 4 16 64]

The physics: a product reads its weight once, `out_features * in_features * 2` bytes in bfloat16, and next to nothing
else. Times are of one call inside a CUDA graph of several, on weights that take turns, so that none is still in L2.
`with all` is the kernel with what is fused in a decoder layer: norm, gate, residual; `F.linear` is the product alone.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from attention import BANDWIDTH, REPEATS, microseconds

from spec_kernels.product import product

SHAPES = {
    "qkv": (6144, 4096, "norm"),
    "o": (4096, 4096, "residual"),
    "gate_up": (14336, 4096, "norm gate"),
    "down": (4096, 14336, "residual"),
    "head": (128256, 4096, ""),
    "draft qkv": (6144, 8192, ""),
    "fc": (4096, 12288, ""),
    "draft head": (32000, 4096, ""),
}
"""Outputs, inputs, and what is fused, of each product."""

BYTES_IN_TURN = 9e8
"""The weights of a case take so many together, many times what L2 holds."""


def times(num_rows: int, out_features: int, in_features: int, fused: str) -> tuple[float, float, float]:
    """Return microseconds of the kernel, of the kernel with all that is fused, and of F.linear."""
    gated = "gate" in fused
    height = out_features * (2 if gated else 1)
    shape, options = (height, in_features), {"device": "cuda", "dtype": torch.bfloat16}
    weights = [torch.randn(shape, **options) for _ in range(max(3, int(BYTES_IN_TURN / (2 * height * in_features))))]
    rows, residual = torch.randn(num_rows, in_features, **options), torch.randn(num_rows, out_features, **options)
    norm_weight = torch.ones(in_features, device="cuda") if "norm" in fused and num_rows <= 16 else None
    arrivals = torch.zeros(height // 16, dtype=torch.int32, device="cuda")
    whole, half = torch.empty(num_rows, height, **options), torch.empty_like(residual)

    def bare(index: int) -> None:
        product(whole, rows, weights[index % len(weights)], arrivals, None, None, 0.0, None, False)

    def with_all(index: int) -> None:
        added = residual if "residual" in fused else None
        product(half, rows, weights[index % len(weights)], arrivals, None, norm_weight, 1e-5, added, gated)

    def library(index: int) -> torch.Tensor:
        return F.linear(rows, weights[index % len(weights)])

    return microseconds(bare), microseconds(with_all), microseconds(library)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, medians of {REPEATS} replays, us")
    print(f"{'rows':>4} {'product':10s} {'bytes':>7} {'kernel':>7} {'with all':>8} {'F.linear':>8}  fused")
    for num_rows in options.rows:
        for name, (out_features, in_features, fused) in SHAPES.items():
            num_bytes = 2 * out_features * in_features * (2 if "gate" in fused else 1)
            kernel, with_all, library = times(num_rows, out_features, in_features, fused)
            floor = 1e6 * num_bytes / BANDWIDTH
            print(f"{num_rows:4d} {name:10s} {floor:7.1f} {kernel:7.1f} {with_all:8.1f} {library:8.1f}  {fused}")


if __name__ == "__main__":
    main()
