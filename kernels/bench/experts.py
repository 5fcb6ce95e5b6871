"""Times the kernels of routed experts on a GPU; compares them with torch's grouped product and the bytes to move.

    PYTHONPATH=.:kernels python kernels/bench/experts.py [--shape qwen3_30b_a3b glm4_7_flash] [--rows 1 4 16 64 256]

Lower bound: with few rows the weights of every chosen expert are read once, `3 * intermediate * hidden * 2` bytes each,
at about 4.2 TB/s on an H200. Rows choose at random here, so that n rows read `E * (1 - (1 - k / E)**n)` of E experts.
In addition four launches in a CUDA graph take some microseconds, however little they read. From about 190 rows per
expert on, arithmetic is the bound (790 TFLOP/s over 4.2 TB/s).

Times are for one call inside a CUDA graph of many, which cycles through layers that together exceed L2, with different
choices in each.
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

from spec_kernels.experts import routed_experts


@dataclass(frozen=True)
class ExpertShape:
    """The experts of one layer."""

    num_experts: int
    num_chosen: int
    hidden_size: int
    intermediate_size: int

    @property
    def expert_bytes(self) -> int:
        """Return the number of bytes of one expert in bfloat16."""
        return 3 * self.intermediate_size * self.hidden_size * 2


SHAPES = {
    "qwen3_30b_a3b": ExpertShape(128, 8, 2048, 768),
    "glm4_7_flash": ExpertShape(64, 4, 2048, 1536),
    "deepseek_v3": ExpertShape(256, 8, 7168, 2048),
}


@dataclass
class Layers:
    """Layers of random weights, which together exceed L2, and the experts that rows choose in each."""

    gate_up: torch.Tensor
    down: torch.Tensor
    rows: torch.Tensor
    expert_ids: torch.Tensor
    weights: torch.Tensor

    @property
    def num_read(self) -> float:
        """Return how many distinct experts of a layer are chosen, on average."""
        return sum(len(ids.unique()) for ids in self.expert_ids) / len(self.expert_ids)

    def microseconds(self, call: Callable[[int], object]) -> float:
        """Return the time of one `call`, which is called for one layer after the other."""
        return microseconds(lambda index: call(index % len(self.gate_up)))


def make_layers(shape: ExpertShape, num_rows: int) -> Layers:
    """Make enough layers that each has left L2 when it is used again. For the largest layers one is enough."""
    read = min(shape.num_experts, num_rows * shape.num_chosen) * shape.expert_bytes
    num_layers = min(8, num_copies(read))

    def randn(*sizes: int) -> torch.Tensor:
        return torch.empty(num_layers, *sizes, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)

    scores = torch.rand(num_layers, num_rows, shape.num_experts, device="cuda")
    return Layers(
        randn(shape.num_experts, 2 * shape.intermediate_size, shape.hidden_size),
        randn(shape.num_experts, shape.hidden_size, shape.intermediate_size),
        randn(num_rows, shape.hidden_size) * 50,
        scores.topk(shape.num_chosen, dim=-1).indices.contiguous(),
        torch.rand(num_layers, num_rows, shape.num_chosen, device="cuda"),
    )


def kernel_time(layers: Layers) -> float:
    def call(index: int) -> torch.Tensor:
        weights, choice = (layers.gate_up[index], layers.down[index]), (layers.expert_ids[index], layers.weights[index])
        return routed_experts(layers.rows[index], *weights, *choice, "silu")

    return layers.microseconds(call)


def grouped_time(layers: Layers) -> float:
    """Time the same with `torch.nn.functional.grouped_mm`; sorting, activation and sum are in torch too."""
    experts = torch.arange(layers.gate_up.shape[1], device="cuda")

    def call(index: int) -> torch.Tensor:
        num_chosen = layers.expert_ids.shape[2]
        by_expert, order = layers.expert_ids[index].flatten().sort(stable=True)
        ends = torch.searchsorted(by_expert, experts, right=True).to(torch.int32)
        rows = layers.rows[index].index_select(0, torch.div(order, num_chosen, rounding_mode="floor"))
        gate, up = F.grouped_mm(rows, layers.gate_up[index].transpose(1, 2), offs=ends).chunk(2, dim=-1)
        out = F.grouped_mm(F.silu(gate) * up, layers.down[index].transpose(1, 2), offs=ends)
        in_rows = torch.empty_like(out).index_copy_(0, order, out).unflatten(0, (-1, num_chosen))
        return (in_rows * layers.weights[index].unsqueeze(-1)).sum(dim=1)

    return layers.microseconds(call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    options = options_of(parser)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, medians of replays")
    print("shape            rows  experts read   kernel us  grouped us    floor us    of floor")
    figures = []
    for name, num_rows in itertools.product(options.shape, options.rows):
        shape = SHAPES[name]
        layers = make_layers(shape, num_rows)
        num_bytes = int(layers.num_read * shape.expert_bytes)
        floor, kernel, grouped = num_bytes / BANDWIDTH * 1e6, kernel_time(layers), grouped_time(layers)
        cells = f"{layers.num_read:14.1f}{kernel:12.1f}{grouped:12.1f}{floor:12.1f}{floor / kernel:12.0%}"
        print(f"{name:15}{num_rows:6}{cells}", flush=True)
        flops = 2 * num_rows * shape.num_chosen * shape.expert_bytes // 2
        figures.append(Figure("routed experts", f"{name}, {num_rows} rows", num_bytes, flops, kernel, grouped))
        del layers
    write_figures(options.csv, figures)


if __name__ == "__main__":
    main()
