"""Times our and the library's products of few rows on a GPU, in the shapes of Llama-3.1-8B and an EAGLE-3 head.

    PYTHONPATH=.:kernels python kernels/bench/products.py [--rows 1 4 16 64] [--fp8]

Lower bound: a product reads its weight once, in numbers of 2 bytes, or of 1 with `--fp8`, and little else. Times are
for one call inside a CUDA graph of several, which cycles through weights so that none is still in L2. The column
`bytes` is the time that reading the weight takes at 4.2 TB/s. `with all` is the kernel with all that a decoder layer
fuses into it: gate, residual, and for up to 16 rows the norm. `F.linear` is the product alone; with `--fp8` the weight
is converted to bfloat16 first.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from attention import BANDWIDTH, REPEATS, microseconds
from figures import require_gpu

from spec_kernels.block_fp8 import dequantise
from spec_kernels.block_fp8_reference import packed
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
"""Output size, input size and fused parts of each product."""

OF_A_LAYER = ("qkv", "o", "gate_up", "down")

BYTES_IN_TURN = 9e8
"""About how many bytes of weights a case cycles through, or more: many times the size of L2."""


def times(num_rows: int, out_features: int, in_features: int, fused: str, is_fp8: bool) -> tuple[float, float, float]:
    """Return the microseconds of the kernel, of the kernel with all fused parts, and of F.linear, for which an e4m3
    weight is converted to bfloat16."""
    gated = "gate" in fused
    height = out_features * (2 if gated else 1)
    shape, options = (height, in_features), {"device": "cuda", "dtype": torch.bfloat16}
    num_weights = max(3, int(BYTES_IN_TURN / ((1 if is_fp8 else 2) * height * in_features)))
    wide = torch.empty(shape, **options)
    weights: list[torch.Tensor] = []
    scales = torch.ones(-(-height // 128), in_features // 128, device="cuda") if is_fp8 else None
    for _ in range(num_weights):
        weight = torch.randn(shape, **options)
        weights.append(packed(weight.to(torch.float8_e4m3fn)) if is_fp8 else weight)
    rows, residual = torch.randn(num_rows, in_features, **options), torch.randn(num_rows, out_features, **options)
    norm_weight = torch.ones(in_features, device="cuda") if "norm" in fused and num_rows <= 16 else None
    arrivals = torch.zeros(height // 16, dtype=torch.int32, device="cuda")
    whole, half = torch.empty(num_rows, height, **options), torch.empty_like(residual)

    def bare(index: int) -> None:
        product(whole, rows, weights[index % len(weights)], arrivals, None, None, 0.0, None, False, scales=scales)

    def with_all(index: int) -> None:
        product(
            half,
            rows,
            weights[index % len(weights)],
            arrivals,
            None,
            norm_weight,
            1e-5,
            residual if "residual" in fused else None,
            gated,
            scales=scales,
        )

    def library(index: int) -> torch.Tensor:
        weight = weights[index % len(weights)]
        if scales is not None:
            dequantise(wide, weight, scales)
            weight = wide
        return F.linear(rows, weight)

    return microseconds(bare), microseconds(with_all), microseconds(library)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--fp8", action="store_true", help="the products of a layer, with weights in e4m3")
    options = parser.parse_args()
    require_gpu()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, medians of {REPEATS} replays, us")
    print(f"{'rows':>4} {'product':10s} {'bytes':>7} {'kernel':>7} {'with all':>8} {'F.linear':>8}  fused")
    for num_rows in options.rows:
        for name, (out_features, in_features, fused) in SHAPES.items():
            if options.fp8 and name not in OF_A_LAYER:
                continue
            num_bytes = (1 if options.fp8 else 2) * out_features * in_features * (2 if "gate" in fused else 1)
            kernel, with_all, library = times(num_rows, out_features, in_features, fused, options.fp8)
            floor = 1e6 * num_bytes / BANDWIDTH
            print(f"{num_rows:4d} {name:10s} {floor:7.1f} {kernel:7.1f} {with_all:8.1f} {library:8.1f}  {fused}")


if __name__ == "__main__":
    main()
