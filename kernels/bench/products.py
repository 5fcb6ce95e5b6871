"""Times our and the library's products of few rows on a GPU, in the shapes of Llama-3.1-8B and an EAGLE-3 head.

    PYTHONPATH=.:kernels python kernels/bench/products.py [--rows 1 4 16 64] [--narrow fp8|int4|mxfp4]

Lower bound: a product reads its weight once, in the bytes that it is stored in, and little else. Times are
for one call inside a CUDA graph of several, which cycles through weights so that none is still in L2. The columns
`MB` and `floor` are the bytes of the weight with its scales, and the time that reading them takes at 4.2 TB/s. `with
all` is the kernel with all that a decoder layer fuses into it: gate, residual, and for up to 16 rows the norm.
`F.linear` is the product alone; a narrow weight is widened to bfloat16 first. With `--narrow`, `to bf16` is the time of
the kernel over its time with the same weight in bfloat16.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from attention import BANDWIDTH, REPEATS, microseconds
from figures import require_gpu

from spec_kernels.block_fp8_reference import packed
from spec_kernels.four_bits_reference import packed_codes
from spec_kernels.product import product
from spec_kernels.widen import widen

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


def stored(height: int, in_features: int, narrow: str | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a random weight as it is stored, and its scales."""
    if narrow is None:
        return torch.randn(height, in_features, device="cuda", dtype=torch.bfloat16), None
    if narrow == "fp8":
        scales = torch.ones(-(-height // 128), in_features // 128, device="cuda")
        return packed(torch.randn(height, in_features, device="cuda").to(torch.float8_e4m3fn)), scales
    codes = torch.randint(16, (height, in_features), device="cuda", dtype=torch.uint8)
    if narrow == "mxfp4":
        return packed_codes(codes), torch.full((height, in_features // 32), 120, device="cuda", dtype=torch.uint8)
    pairs = torch.tensor([0.01, 8.0], device="cuda", dtype=torch.bfloat16)
    return packed_codes(codes), pairs.expand(height, in_features // 128, 2).contiguous()


def times(
    num_rows: int, out_features: int, in_features: int, fused: str, narrow: str | None
) -> tuple[int, float, float, float]:
    """Return the bytes of a weight, and the microseconds of the kernel, of the kernel with all fused parts, and of
    F.linear, for which a narrow weight is widened."""
    gated = "gate" in fused
    height = out_features * (2 if gated else 1)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    weight, scales = stored(height, in_features, narrow)
    num_bytes = weight.nbytes + (0 if scales is None else scales.nbytes)
    weights = [weight, *(weight.clone() for _ in range(max(2, int(BYTES_IN_TURN / num_bytes))))]
    wide = torch.empty(height, in_features, **options)
    rows, residual = torch.randn(num_rows, in_features, **options), torch.randn(num_rows, out_features, **options)
    norm_weight = torch.ones(in_features, device="cuda") if "norm" in fused and num_rows <= 16 else None
    arrivals = torch.zeros(height // 16, dtype=torch.int32, device="cuda")

    def bare(index: int) -> torch.Tensor:
        return product(rows, weights[index % len(weights)], arrivals, None, None, 0.0, None, False, scales=scales)

    def with_all(index: int) -> torch.Tensor:
        return product(
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
            widen(wide, weight, scales)
            weight = wide
        return F.linear(rows, weight)

    return num_bytes, microseconds(bare), microseconds(with_all), microseconds(library)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--narrow", choices=("fp8", "int4", "mxfp4"), help="a layer's products, with narrow weights")
    options = parser.parse_args()
    require_gpu()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, medians of {REPEATS} replays, us")
    heads = f"{'MB':>7} {'floor':>7} {'kernel':>7} {'with all':>8} {'F.linear':>8} {'to bf16':>7}"
    print(f"{'rows':>4} {'product':10s} {heads}  fused")
    for num_rows in options.rows:
        for name, (out_features, in_features, fused) in SHAPES.items():
            if options.narrow and name not in OF_A_LAYER:
                continue
            num_bytes, kernel, with_all, library = times(num_rows, out_features, in_features, fused, options.narrow)
            ratio = "-"
            if options.narrow:
                ratio = f"{with_all / times(num_rows, out_features, in_features, fused, None)[2]:.2f}"
            floor = 1e6 * num_bytes / BANDWIDTH
            numbers = f"{num_bytes / 1e6:7.1f} {floor:7.1f} {kernel:7.1f} {with_all:8.1f} {library:8.1f}"
            print(f"{num_rows:4d} {name:10s} {numbers} {ratio:>7}  {fused}")


if __name__ == "__main__":
    main()
