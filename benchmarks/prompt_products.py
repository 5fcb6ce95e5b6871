"""Times products of a prompt's rows on a GPU, and checks whether a row's bits depend on the other rows.

    PYTHONPATH=.:kernels python benchmarks/prompt_products.py [--only times bits experts]     # about 30 s

Shapes are those of Llama-3.1-8B and of a layer of Qwen3-30B-A3B's experts; numbers are random, in bfloat16.

library  torch's usual product; for experts, that of kernels=torch
unsplit  torch's product as prompt passes call it (`spec_lab.operators.prompt_rounding`)
ours     a product in Triton whose tiles are loaded by TMA; for experts, that of kernels=triton

A line of bits counts the rows whose bits differ from those in a product of 8192 rows, and names the numbers of rows at
which any row differs. For experts, up to 256 rows are compared with a forward of 256 rows, and more with one of 2048.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby, pairwise

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from spec_kernels.gate import gated
from spec_lab.models.experts import RoutedExperts, SortedExperts
from spec_lab.models.routers import Routing
from spec_lab.operators.prompt_rounding import inputs_unsplit
from spec_lab.operators.triton_experts import TritonExperts
from spec_lab.program.ending import guarded

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
SIZES = (512, 1024, 2048, 4096, 8192)
MOST = 8192
COUNTS = tuple(
    sorted({*range(1, 17), *range(17, 640, 7), *range(56, 116, 4), *range(640, MOST, 577), *SIZES, 64, 128, 256, 475})
)
EXPERTS, CHOSEN, HIDDEN, INNER = 128, 8, 2048, 768
PAIRS = (512, 2048, 4096, 8192, 32768, 65536)
EXPERT_COUNTS = {256: (17, 37, 100, 255), 2048: (257, 300, 475, 1024)}
TILE = {"ROWS": 128, "COLUMNS": 256, "DEPTH": 64}
Way = Callable[[torch.Tensor], torch.Tensor]


@triton.jit
def _tiles(
    rows: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """Computes tiles of a product, one after the other; neighbours share their rows or columns in L2."""
    row_tiles, column_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(out_features, COLUMNS)
    GROUP: tl.constexpr = 8
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        group = tile // (GROUP * column_tiles)
        height = min(row_tiles - group * GROUP, GROUP)
        row = (group * GROUP + tile % height) * ROWS
        column = tile % (GROUP * column_tiles) // height * COLUMNS
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for depth in range(0, in_features, DEPTH):
            sums = tl.dot(rows.load([row, depth]), weight.load([column, depth]).T, sums)
        out.store([row, column], sums.to(out.dtype))


def by_library(weight: torch.Tensor) -> Way:
    return lambda rows: F.linear(rows, weight)


def by_unsplit(weight: torch.Tensor) -> Way:
    def run(rows: torch.Tensor) -> torch.Tensor:
        with inputs_unsplit():
            return F.linear(rows, weight)

    return run


def by_unsplit_added(weight: torch.Tensor) -> Way:
    """Make a product that is added to the residual stream as it is written, like an MLP's second product."""

    def run(rows: torch.Tensor) -> torch.Tensor:
        with inputs_unsplit():
            return rows.new_ones(len(rows), len(weight)).addmm_(rows, weight.t())

    return run


def by_ours(weight: torch.Tensor) -> Way:
    out_features, in_features = weight.shape
    brought = TensorDescriptor.from_tensor(weight, [TILE["COLUMNS"], TILE["DEPTH"]])
    num_programs = torch.cuda.get_device_properties(weight.device).multi_processor_count

    def run(rows: torch.Tensor) -> torch.Tensor:
        out = rows.new_empty(len(rows), out_features)
        source = TensorDescriptor.from_tensor(rows, [TILE["ROWS"], TILE["DEPTH"]])
        target = TensorDescriptor.from_tensor(out, [TILE["ROWS"], TILE["COLUMNS"]])
        num_tiles = triton.cdiv(len(rows), TILE["ROWS"]) * triton.cdiv(out_features, TILE["COLUMNS"])
        _tiles[(min(num_programs, num_tiles),)](
            source, brought, target, len(rows), out_features, in_features, **TILE, num_warps=8, num_stages=3
        )
        return out

    return run


WAYS = {"library": by_library, "unsplit": by_unsplit, "ours": by_ours}


def microseconds(run: Callable[[], object], seconds: float = 0.03) -> float:
    """Return the median time of 5 to 50 calls in a row."""
    for _ in range(2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
    times = max(5, min(50, int(seconds * 1e3 / max(start.elapsed_time(end), 1e-3))))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    for event in events:
        event.record()
        run()
    torch.cuda.synchronize()
    return 1e3 * sorted(first.elapsed_time(second) for first, second in pairwise(events))[times // 2]


def print_head(what: str, columns: Iterable[int]) -> None:
    print(f"\n{what:26}" + "".join(f"{column:14d}" for column in columns))


def print_rates(name: str, times: Iterable[float], flops: Iterable[float]) -> None:
    """Print microseconds, with TFLOP/s in brackets."""
    cells = [f"{time:.0f} ({num / time / 1e6:.0f})" for time, num in zip(times, flops, strict=True)]
    print(f"{name:26}" + "".join(f"{cell:>14}" for cell in cells), flush=True)


def time_products(weights: dict[str, torch.Tensor], rows: dict[int, torch.Tensor]) -> None:
    """Print the time of every way; for gate_up also with the activation after it."""
    print_head("us (TFLOP/s)", SIZES)
    for name, weight in weights.items():
        flops, sources = [2.0 * size * weight.numel() for size in SIZES], rows[weight.shape[1]]
        ways = {way: make(weight) for way, make in WAYS.items()}
        if name == "gate_up":
            ways["library, gated"] = gate_behind(ways["library"])
        for way, run in ways.items():
            times = [microseconds(partial(run, sources[:size])) for size in SIZES]
            print_rates(f"{name} {way}", times, flops)


def gate_behind(product: Way) -> Way:
    def run(rows: torch.Tensor) -> torch.Tensor:
        gate, up = product(rows).chunk(2, dim=1)
        out = gate.new_empty(gate.shape)
        gated(out, gate, up, "silu")
        return out

    return run


def compare_bits(weights: dict[str, torch.Tensor], rows: dict[int, torch.Tensor]) -> None:
    """Print for every way how many rows have other bits than in a product of `MOST` rows. Also print how many rows of
    that product differ from `unsplit`."""
    print()
    for name, weight in weights.items():
        sources = rows[weight.shape[1]]
        expected = by_unsplit(weight)(sources)
        for way, make in (WAYS | {"unsplit, added": by_unsplit_added}).items():
            run = make(weight)
            whole = run(sources)
            different = []
            for index, count in enumerate(COUNTS):
                some = slice(offset := index * 389 % (MOST - count + 1), offset + count)
                different.append((run(sources[some]) != whole[some]).any(1).sum())
            print_differing(f"{name} {way}", COUNTS, torch.stack(different).tolist())
            print(f"{'':26}{(whole != expected).any(1).sum().item()} of {MOST} rows differ from unsplit", flush=True)


def print_differing(name: str, counts: Sequence[int], different: list[int]) -> None:
    """Print how many rows differ, and at which of the tried numbers of rows, as ranges."""
    runs = groupby(zip(counts, different, strict=True), lambda pair: pair[1] > 0)
    found = [[count for count, _ in pairs] for is_different, pairs in runs if is_different]
    ranges = [str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in found]
    print(f"{name:26}{sum(different)} of {sum(counts)} rows differ [{', '.join(ranges)}]", flush=True)


def time_experts() -> None:
    """Print the time of a layer's experts without the router, and whether a row's bits depend on the other rows."""
    gate_up = randn(EXPERTS, 2 * INNER, HIDDEN) / HIDDEN**0.5
    down = randn(EXPERTS, HIDDEN, INNER) / INNER**0.5
    ways: dict[str, RoutedExperts] = {
        "library": SortedExperts(gate_up, down),
        "ours": TritonExperts(gate_up, down, F.silu),
    }
    rows = randn(max(PAIRS) // CHOSEN, HIDDEN)
    scores, ids = randn(len(rows), EXPERTS).float().topk(CHOSEN)
    routing = Routing(ids, scores.softmax(-1))

    def chosen(some: slice) -> Routing:
        return Routing(routing.expert_ids[some], routing.weights[some])

    print_head("experts by pairs, us", PAIRS)
    for way, experts in ways.items():
        parts = [slice(0, num_pairs // CHOSEN) for num_pairs in PAIRS]
        cases = [(rows[some], chosen(some)) for some in parts]
        times = [microseconds(partial(experts, *case)) for case in cases]
        print_rates(way, times, [num_pairs * 6.0 * HIDDEN * INNER for num_pairs in PAIRS])
    for way, experts in ways.items():
        for most, counts in EXPERT_COUNTS.items():
            whole, different = experts(rows[:most], chosen(slice(0, most))), []
            for count in counts:
                some = slice(most - count, most)
                different.append(int((experts(rows[some], chosen(some)) != whole[some]).any(1).sum().item()))
            print_differing(f"experts {way}, of {most}", counts, different)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["times", "bits", "experts"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("what is timed here runs on a GPU, and torch sees none")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, bfloat16")
    with torch.inference_mode():
        weights = {name: randn(*shape) / shape[1] ** 0.5 for name, shape in SHAPES.items()}
        rows = {width: randn(MOST, width) for width in (4096, 14336)}
        if "times" in options.only:
            time_products(weights, rows)
        if "bits" in options.only:
            compare_bits(weights, rows)
        if "experts" in options.only:
            time_experts()


if __name__ == "__main__":
    sys.exit(guarded(main))
