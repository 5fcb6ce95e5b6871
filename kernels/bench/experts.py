"""Times the kernels of routed experts on a GPU; compares them with torch's grouped product and the bytes to move.

    PYTHONPATH=.:kernels python kernels/bench/experts.py [--shape qwen3_30b_a3b glm4_7_flash] [--rows 1 4 16 64 256]
        [--narrow int4|mxfp4]

Lower bound: with few rows the weights of every chosen expert are read once, with their scales, at about 4.2 TB/s on an
H200. Rows choose at random here, so that n rows read `E * (1 - (1 - k / E)**n)` of E experts. In addition up to four
launches in a CUDA graph take some microseconds, however little they read. From about 190 rows per expert on, arithmetic
is the bound (790 TFLOP/s over 4.2 TB/s).

Times are for one call inside a CUDA graph of many, which cycles through layers that together exceed L2, with different
choices in each. `kernel` is what a run launches for so many rows, `grouped` the form in torch. With `--narrow` weights
are of 4 bits. Then `widened` is the kernel for 16 bits after both weights of the layer were widened in memory, as for a
prompt's many rows (`expert_tiles.MOST_NARROW_PAIRS` says from when on), and `to bf16` is the time of the kernel over
its time with weights in bfloat16.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from attention import BANDWIDTH, microseconds, num_copies
from figures import Figure, options_of, write_figures

from spec_kernels.widen import widen
from spec_lab.models.experts import ExpertProduct, RoutedExperts, SortedExperts
from spec_lab.models.routers import Routing
from spec_lab.operators.triton_experts import TritonExperts


@dataclass(frozen=True)
class ExpertShape:
    """The experts of one layer; with a `limit` they have biases and are clamped."""

    num_experts: int
    num_chosen: int
    hidden_size: int
    intermediate_size: int
    limit: float | None = None

    def product(self, height: int, width: int, narrow: str | None) -> ExpertProduct:
        """Return random weights [experts, height, width] as they are stored."""
        bias = None
        if self.limit is not None:
            bias = torch.randn(self.num_experts, height, device="cuda", dtype=torch.bfloat16)
        if narrow is None:
            weight = torch.empty(self.num_experts, height, width, device="cuda", dtype=torch.bfloat16)
            return ExpertProduct(weight.normal_(0, 0.02), None, bias)
        codes = torch.randint(16, (self.num_experts, height, width), device="cuda", dtype=torch.uint8)
        scales = torch.full((self.num_experts, height, -(-width // 32)), 120, device="cuda", dtype=torch.uint8)
        if narrow == "int4":
            pair = torch.tensor([0.003, 8.0], device="cuda", dtype=torch.bfloat16)
            scales = pair.expand(self.num_experts, height, -(-width // 128), 2).contiguous()
        return ExpertProduct(codes, scales, bias)


SHAPES = {
    "qwen3_30b_a3b": ExpertShape(128, 8, 2048, 768),
    "glm4_7_flash": ExpertShape(64, 4, 2048, 1536),
    "gpt_oss_20b": ExpertShape(32, 4, 2880, 2880, limit=7.0),
    "deepseek_v3": ExpertShape(256, 8, 7168, 2048),
}


class Layers:
    """Layers of random weights, which together exceed L2, and the experts that rows choose in each."""

    def __init__(self, shape: ExpertShape, num_rows: int, narrow: str | None) -> None:
        """Make enough layers that each has left L2 when it is used again. For the largest layers one is enough."""
        hidden, inner = shape.hidden_size, shape.intermediate_size
        sizes = (2 * inner, hidden), (hidden, inner)
        self.shape = shape
        self.products = [tuple(shape.product(*size, narrow) for size in sizes)]
        self.expert_bytes = sum(product.expert_bytes for product in self.products[0])
        read = min(shape.num_experts, num_rows * shape.num_chosen) * self.expert_bytes
        while len(self.products) < min(8, num_copies(read)):
            self.products.append(tuple(shape.product(*size, narrow) for size in sizes))
        self.rows = torch.randn(num_rows, hidden, device="cuda", dtype=torch.bfloat16)
        scores = torch.rand(len(self.products), num_rows, shape.num_experts, device="cuda")
        ids = scores.topk(shape.num_chosen, dim=-1).indices
        self.choices = [Routing(each.contiguous(), torch.rand(each.shape, device="cuda")) for each in ids]

    def microseconds(self, make: Callable[..., RoutedExperts], widened: bool = False) -> float:
        """Return the time of the experts that `make` makes, one layer after the other, or of those of widened
        weights."""
        limit, layers = self.shape.limit, len(self.products)
        made = [make(*products, F.silu, limit) for products in self.products]

        def call(index: int) -> torch.Tensor:
            experts = made[index % layers]
            if widened:
                products = self.products[index % layers]
                wide = (ExpertProduct(each.widened_by(widen, torch.bfloat16), None, each.bias) for each in products)
                experts = make(*wide, F.silu, limit)
            return experts(self.rows, self.choices[index % layers])

        return microseconds(call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--narrow", choices=("int4", "mxfp4"), help="weights of 4 bits, beside bfloat16")
    options = options_of(parser)
    narrow = options.narrow
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {narrow or 'bfloat16'}, medians of replays")
    other = "widened us     bf16 us    to bf16" if narrow else "grouped us"
    print(f"shape            rows  experts read   kernel us    floor us    of floor  {other}")
    figures = []
    for name, num_rows in itertools.product(options.shape, options.rows):
        shape = SHAPES[name]
        layers = Layers(shape, num_rows, narrow)
        read = sum(len(choice.expert_ids.unique()) for choice in layers.choices) / len(layers.choices)
        num_bytes = int(read * layers.expert_bytes)
        floor, kernel = num_bytes / BANDWIDTH * 1e6, layers.microseconds(TritonExperts)
        reference = layers.microseconds(TritonExperts if narrow else SortedExperts, widened=narrow is not None)
        cells = f"{read:14.1f}{kernel:12.1f}{floor:12.1f}{floor / kernel:12.0%}{reference:12.1f}"
        del layers
        if narrow:
            wide = Layers(shape, num_rows, None).microseconds(TritonExperts)
            cells += f"{wide:12.1f}{kernel / wide:11.2f}"
        print(f"{name:15}{num_rows:6}{cells}", flush=True)
        flops = 6 * num_rows * shape.num_chosen * shape.intermediate_size * shape.hidden_size
        figures.append(Figure("routed experts", f"{name}, {num_rows} rows", num_bytes, flops, kernel, reference))
    write_figures(options.csv, figures)


if __name__ == "__main__":
    main()
