"""Times the products of experts on a CPU, for few rows: the lab's grouped products, and three other ways to compute
them.

    python benchmarks/expert_products.py --experts 16 --chosen 2 --inner 128 --hidden 192        # about 10 s

It prints microseconds, the least of several stretches of calls. `sorted` is `SortedExperts`. `wide` computes every
expert for every row, as one MLP packed for oneDNN. `loop` reads on the host which experts were chosen, which a graph
cannot do. `gathered` copies the weights of the experts that each row chose.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
import torch.nn.functional as F

from spec_lab.checkpoints.expert_sizes import ExpertSizes, RouterScores
from spec_lab.models.experts import RoutedExperts, SortedExperts
from spec_lab.models.linear import make_linear
from spec_lab.models.routers import Routing, SoftmaxRouter
from spec_lab.program.ending import guarded
from spec_lab.program.table import format_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("experts", 16), ("chosen", 2), ("inner", 128), ("hidden", 192)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gate_up = torch.randn(options.experts, 2 * options.inner, options.hidden) / options.hidden**0.5
    down = torch.randn(options.experts, options.hidden, options.inner) / options.inner**0.5
    sizes = ExpertSizes(options.experts, options.chosen, options.inner, RouterScores.SOFTMAX)
    router = SoftmaxRouter(torch.randn(options.experts, options.hidden) / options.hidden**0.5, sizes)
    ways: dict[str, RoutedExperts] = {
        "sorted": SortedExperts(gate_up, down),
        "wide": wide(gate_up, down),
        "loop": loop(gate_up, down),
        "gathered": gathered(gate_up, down),
    }
    body = []
    with torch.inference_mode():
        for count in options.rows:
            rows = torch.randn(count, options.hidden)
            routing = router(rows)
            expected = ways["loop"](rows, routing)
            for way in ways.values():
                torch.testing.assert_close(way(rows, routing), expected, rtol=0, atol=1e-4)
            times = [microseconds(way, rows, routing) for way in ways.values()]
            body.append([str(count), *[f"{value:.0f}" for value in times]])
    print(format_table(["rows", *ways], body, left=()))


def wide(gate_up: torch.Tensor, down: torch.Tensor) -> RoutedExperts:
    """Make one product of all experts, in which weights of 0 leave out those that a row did not choose."""
    gates, ups = gate_up.chunk(2, dim=1)
    gate_up_product = make_linear(torch.cat((gates.flatten(0, 1), ups.flatten(0, 1))))
    down_product = make_linear(down.transpose(0, 1).flatten(1))

    def run(rows: torch.Tensor, routing: Routing) -> torch.Tensor:
        gate, up = gate_up_product(rows).chunk(2, dim=-1)
        weights = torch.zeros(len(rows), len(gate_up)).scatter_(1, routing.expert_ids, routing.weights)
        inner = (F.silu(gate) * up).unflatten(-1, (len(gate_up), -1)) * weights.unsqueeze(-1)
        return down_product(inner.flatten(1))

    return run


def loop(gate_up: torch.Tensor, down: torch.Tensor) -> RoutedExperts:
    """Make the chosen experts' products one after another."""

    def run(rows: torch.Tensor, routing: Routing) -> torch.Tensor:
        out = torch.zeros_like(rows)
        for expert in routing.expert_ids.unique().tolist():
            chose, place = torch.where(routing.expert_ids == expert)
            gate, up = F.linear(rows[chose], gate_up[expert]).chunk(2, dim=-1)
            product = F.linear(F.silu(gate) * up, down[expert])
            out.index_add_(0, chose, product * routing.weights[chose, place].unsqueeze(-1))
        return out

    return run


def gathered(gate_up: torch.Tensor, down: torch.Tensor) -> RoutedExperts:
    """Gather the matrices that each row chose, and make one batch of products of them."""

    def run(rows: torch.Tensor, routing: Routing) -> torch.Tensor:
        num_chosen, ids = routing.expert_ids.shape[1], routing.expert_ids.flatten()
        repeated = rows.repeat_interleave(num_chosen, dim=0).unsqueeze(2)
        gate, up = torch.bmm(gate_up[ids], repeated).squeeze(2).chunk(2, dim=-1)
        out = torch.bmm(down[ids], (F.silu(gate) * up).unsqueeze(2)).squeeze(2).unflatten(0, (-1, num_chosen))
        return (out * routing.weights.unsqueeze(-1)).sum(dim=1)

    return run


def microseconds(
    way: RoutedExperts, rows: torch.Tensor, routing: Routing, stretches: int = 7, calls: int = 10
) -> float:
    """Return the mean time of a call, in the fastest stretch of calls."""
    best = float("inf")
    for _ in range(stretches):
        start = time.perf_counter()
        for _ in range(calls):
            way(rows, routing)
        best = min(best, (time.perf_counter() - start) / calls)
    return 1e6 * best


if __name__ == "__main__":
    sys.exit(guarded(main))
