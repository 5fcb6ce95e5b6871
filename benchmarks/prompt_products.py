"""Times ways to multiply a prompt's rows on a GPU, and looks whether a row has the same bits whatever stands beside it.

    PYTHONPATH=.:kernels python benchmarks/prompt_products.py [--only dense,bits,kernels,experts]     # about 80 s

The shapes are those of Llama-3.1-8B and of a layer of Qwen3-30B-A3B's experts, bfloat16, random numbers. A way that
fails says so and is left out. "rows that differ" are those of a product of M rows whose bits are not those that they
have among 8192.

A tensor core adds to each sum sixteen products at a time, in the order of the inputs. Unless a kernel splits the
inputs, nothing else about its tiles should reach the bits: that is what is asked here of all of them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

os.environ.setdefault("TRITON_PRINT_AUTOTUNING", "0")

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from spec_kernels.experts import _add_terms, _sort_pairs, routed_experts
from spec_kernels.gate import activate, gated
from spec_lab.models.experts import SortedExperts
from spec_lab.models.routers import Routing

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
SIZES = (512, 1024, 2048, 4096, 8192)
MOST = 8192
EXPERTS, CHOSEN, HIDDEN, INNER = 128, 8, 2048, 768
PAIRS = (512, 2048, 4096, 8192, 32768, 65536)
Way = Callable[[torch.Tensor], torch.Tensor]


@triton.jit
def _tiles(
    a, b, c, num_rows, out_features, in_features,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GATED: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Computes tiles of a product, or of silu(gate) * up, one after the other; rows of a group of tiles share L2."""
    row_tiles, column_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(out_features, COLUMNS)
    GROUP: tl.constexpr = 8
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=FLAT):
        group = tile // (GROUP * column_tiles)
        height = min(row_tiles - group * GROUP, GROUP)
        row = (group * GROUP + tile % height) * ROWS
        column = tile % (GROUP * column_tiles) // height * COLUMNS
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        ups = tl.zeros((ROWS, COLUMNS), tl.float32)
        for depth in range(0, in_features, DEPTH):
            rows = a.load([row, depth])
            sums = tl.dot(rows, b.load([column, depth]).T, sums)
            if GATED:
                ups = tl.dot(rows, b.load([out_features + column, depth]).T, ups)
        if GATED:
            sums = activate(sums, False) * ups
        c.store([row, column], sums.to(c.dtype))


@triton.jit
def _own_tile(starts_ptr, tile, EXPERTS: tl.constexpr, PAIRS: tl.constexpr):
    """Returns the expert of a tile of pairs, its first pair and where that expert's end; EXPERTS if there is none."""
    experts = tl.arange(0, EXPERTS)
    starts, ends = tl.load(starts_ptr + experts), tl.load(starts_ptr + experts + 1)
    tiles = (ends - starts + PAIRS - 1) // PAIRS
    behind = tl.cumsum(tiles, 0)
    expert = tl.sum((behind <= tile).to(tl.int32), 0)
    is_own = experts == expert
    first = tl.sum(tl.where(is_own, starts + (tile - behind + tiles) * PAIRS, 0), 0)
    return expert, first, tl.sum(tl.where(is_own, ends, 0), 0)


@triton.jit
def _gate_up_tiles(
    inner_ptr, rows_ptr, weights, order_ptr, starts_ptr, row_stride,
    CHOSEN: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert, first, end = _own_tile(starts_ptr, tl.program_id(1), EXPERTS, PAIRS)
    if expert < EXPERTS:
        column = tl.program_id(0) * COLUMNS
        places = first + tl.arange(0, PAIRS)
        sources = tl.load(order_ptr + places, mask=places < end, other=0) // CHOSEN
        row_ptrs = rows_ptr + sources.to(tl.int64)[:, None] * row_stride + tl.arange(0, DEPTH)[None, :]
        TURNED: tl.constexpr = PAIRS < 64
        gates = tl.zeros((COLUMNS, PAIRS) if TURNED else (PAIRS, COLUMNS), tl.float32)
        ups = tl.zeros((COLUMNS, PAIRS) if TURNED else (PAIRS, COLUMNS), tl.float32)
        for depth in range(0, HIDDEN, DEPTH):
            rows = tl.load(row_ptrs + depth)
            gate = weights.load([expert * 2 * INNER + column, depth])
            up = weights.load([expert * 2 * INNER + INNER + column, depth])
            if TURNED:
                gates, ups = tl.dot(gate, rows.T, gates), tl.dot(up, rows.T, ups)
            else:
                gates, ups = tl.dot(rows, gate.T, gates), tl.dot(rows, up.T, ups)
        inner_ptrs = inner_ptr + places.to(tl.int64)[:, None] * INNER + (column + tl.arange(0, COLUMNS))[None, :]
        inner = activate(gates, False) * ups
        if TURNED:
            inner = inner.T
        tl.store(inner_ptrs, inner.to(inner_ptr.dtype.element_ty), mask=(places < end)[:, None])


@triton.jit
def _down_tiles(
    terms_ptr, inner, weights, routing_ptr, order_ptr, starts_ptr,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert, first, end = _own_tile(starts_ptr, tl.program_id(1), EXPERTS, PAIRS)
    if expert < EXPERTS:
        column = tl.program_id(0) * COLUMNS
        TURNED: tl.constexpr = PAIRS < 64
        sums = tl.zeros((COLUMNS, PAIRS) if TURNED else (PAIRS, COLUMNS), tl.float32)
        for depth in range(0, INNER, DEPTH):
            rows, weight = inner.load([first, depth]), weights.load([expert * HIDDEN + column, depth])
            if TURNED:
                sums = tl.dot(weight, rows.T, sums)
            else:
                sums = tl.dot(rows, weight.T, sums)
        if TURNED:
            sums = sums.T
        places = first + tl.arange(0, PAIRS)
        pairs = tl.load(order_ptr + places, mask=places < end, other=0)
        sums *= tl.load(routing_ptr + pairs, mask=places < end, other=0.0)[:, None]
        term_ptrs = terms_ptr + pairs.to(tl.int64)[:, None] * HIDDEN + (column + tl.arange(0, COLUMNS))[None, :]
        tl.store(term_ptrs, sums.to(terms_ptr.dtype.element_ty), mask=(places < end)[:, None])


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tile of a program of ours, and how it is compiled."""

    rows: int
    columns: int
    depth: int = 64
    num_warps: int = 8
    num_stages: int = 3
    is_flat: bool = True

    def product(self, weight: torch.Tensor, is_gated: bool = False) -> Way:
        height, in_features = weight.shape
        out_features = height // 2 if is_gated else height
        columns = self.columns // 2 if is_gated else self.columns
        b = TensorDescriptor.from_tensor(weight, [columns, self.depth])
        num_programs = torch.cuda.get_device_properties(0).multi_processor_count if weight.is_cuda else 4

        def run(rows: torch.Tensor) -> torch.Tensor:
            out = rows.new_empty(len(rows), out_features)
            a = TensorDescriptor.from_tensor(rows, [self.rows, self.depth])
            c = TensorDescriptor.from_tensor(out, [self.rows, columns])
            num_tiles = -(-len(rows) // self.rows) * -(-out_features // columns)
            _tiles[(min(num_programs, num_tiles),)](
                *(a, b, c, len(rows), out_features, in_features),
                *(self.rows, columns, self.depth, is_gated, self.is_flat and not is_gated),
                num_warps=self.num_warps,
                num_stages=self.num_stages,
            )
            return out

        return run

    def experts(self, gate_up: torch.Tensor, down: torch.Tensor, of_down: Tiles) -> Callable[..., torch.Tensor]:
        num_experts, hidden, inner_size = down.shape
        first = TensorDescriptor.from_tensor(gate_up.flatten(0, 1), [self.columns, self.depth])
        second = TensorDescriptor.from_tensor(down.flatten(0, 1), [of_down.columns, of_down.depth])

        def run(rows: torch.Tensor, routing: Routing) -> torch.Tensor:
            num_pairs, chosen = routing.expert_ids.numel(), routing.expert_ids.shape[1]
            order, starts = sorted_pairs(routing, num_experts)
            inner, terms = rows.new_empty(num_pairs, inner_size), rows.new_empty(num_pairs, hidden)
            _gate_up_tiles[(inner_size // self.columns, -(-num_pairs // self.rows) + num_experts)](
                *(inner, rows, first, order, starts, rows.stride(0)),
                *(chosen, hidden, inner_size, num_experts, self.rows, self.columns, self.depth),
                num_warps=self.num_warps,
                num_stages=self.num_stages,
            )
            narrow = TensorDescriptor.from_tensor(inner, [of_down.rows, of_down.depth])
            _down_tiles[(hidden // of_down.columns, -(-num_pairs // of_down.rows) + num_experts)](
                *(terms, narrow, second, routing.weights, order, starts),
                *(hidden, inner_size, num_experts, of_down.rows, of_down.columns, of_down.depth),
                num_warps=of_down.num_warps,
                num_stages=of_down.num_stages,
            )
            out = torch.empty_like(rows)
            _add_terms[(len(rows), -(-hidden // 512))](
                out, terms, out, 0, NUM_CHOSEN=chosen, HIDDEN=hidden, CHANNEL_TILE=512, HAS_RESIDUAL=False
            )
            return out

        return run


def sorted_pairs(routing: Routing, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    num_pairs = routing.expert_ids.numel()
    order, starts = (routing.expert_ids.new_empty(n, dtype=torch.int32) for n in (num_pairs, num_experts + 1))
    _sort_pairs[(num_experts + 1,)](
        order, starts, routing.expert_ids, num_pairs, PAIR_TILE=1024 if num_pairs < 8192 else 4096, NO_EXPERT=1 << 30
    )
    return order, starts


@contextmanager
def unsplit() -> Iterator[None]:
    """Let cuBLASLt choose among algorithms that do not split the inputs."""
    matmul = torch.backends.cuda.matmul
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = (True, True)
        torch.backends.cuda.preferred_blas_library(before)


def sliced(weight: torch.Tensor, size: int) -> Way:
    def run(rows: torch.Tensor) -> torch.Tensor:
        padded = F.pad(rows, (0, 0, 0, -len(rows) % size))
        out = rows.new_empty(len(padded), len(weight))
        for start in range(0, len(padded), size):
            torch.mm(padded[start : start + size], weight.t(), out=out[start : start + size])
        return out[: len(rows)]

    return run


def by_library(weight: torch.Tensor) -> Way:
    return lambda rows: F.linear(rows, weight)


def by_unsplit(weight: torch.Tensor) -> Way:
    def run(rows: torch.Tensor) -> torch.Tensor:
        with unsplit():
            return F.linear(rows, weight)

    return run


def added(weight: torch.Tensor) -> Way:
    """The product added to a stream of ones, as an MLP's second one is."""

    def run(rows: torch.Tensor) -> torch.Tensor:
        with unsplit():
            return rows.new_ones(len(rows), len(weight)).addmm_(rows, weight.t())

    return run


def padded_to(least: int, way: Way) -> Way:
    """The way of at least so many rows."""
    return lambda rows: way(F.pad(rows, (0, 0, 0, max(0, least - len(rows)))))[: len(rows)]


OURS = {
    "ours 128x256": Tiles(128, 256),
    "ours 128x256, not flat": Tiles(128, 256, is_flat=False),
    "ours 128x128": Tiles(128, 128, num_stages=4),
    "ours 64x128": Tiles(64, 128, num_warps=4, num_stages=4),
}


def microseconds(run: Callable[[], object], most: float = 0.03) -> float:
    """Return the median of calls that follow each other, for up to `most` seconds."""
    run()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    times = max(5, min(50, int(most * 1e3 / max(start.elapsed_time(end), 1e-3))))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    for event in events:
        event.record()
        run()
    torch.cuda.synchronize()
    return 1e3 * sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))[times // 2]


def attempt(name: str, run: Callable[[], str]) -> str:
    try:
        return run()
    except Exception as error:
        print(f"  {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return "-"


def dense(weights: dict[str, torch.Tensor], rows_of: Callable[[int, int], torch.Tensor]) -> None:
    """Print the time and the rate of every way, a line each."""
    print(f"\n{'microseconds (TFLOP/s)':26s}" + "".join(f"{size:>16d}" for size in SIZES))
    for name, weight in weights.items():
        ways = {"library": by_library(weight), "unsplit": by_unsplit(weight)}
        ways |= {f"slices of {size}": sliced(weight, size) for size in (512, 1024, 2048)}
        ways |= {way: tiles.product(weight) for way, tiles in OURS.items()}
        if name == "gate_up":
            ways["library, gate"] = gate_behind(by_library(weight))
            ways["ours 128x256, gate"] = Tiles(128, 256).product(weight, is_gated=True)
        for way, run in ways.items():
            line = [f"{name:8s}{way:22s}"]
            for size in SIZES:
                rows, flops = rows_of(size, weight.shape[1]), 2 * size * weight.numel()

                def timed(run: Way = run, rows: torch.Tensor = rows, flops: int = flops) -> str:
                    time = microseconds(lambda: run(rows))
                    return f"{time:.0f} ({flops / time / 1e6:.0f})"

                line.append(f"{attempt(way, timed):>16s}")
                if line[-1].strip() == "-":
                    break
            print("".join(line), flush=True)


def gate_behind(product: Way) -> Way:
    def run(rows: torch.Tensor) -> torch.Tensor:
        gate, up = product(rows).chunk(2, dim=1)
        out = gate.new_empty(gate.shape)
        gated(out, gate, up, "silu")
        return out

    return run


def bits(weights: dict[str, torch.Tensor], rows_of: Callable[[int, int], torch.Tensor]) -> None:
    """Print, for every way, the numbers of rows among which rows have other bits than among 8192."""
    counts = [*range(1, 17), *range(17, 640, 7), *range(56, 116, 4), *range(640, 8192, 577)]
    counts += [64, 128, 256, 475, 512, 1024, 2048, 4096, 7680]
    print("\nrows that differ from those among 8192, at some offset; in brackets the numbers of rows")
    for name, weight in weights.items():
        ways = {"library": by_library(weight), "unsplit": by_unsplit(weight), "unsplit, added": added(weight)}
        ways |= {f"unsplit, of {least}": padded_to(least, by_unsplit(weight)) for least in (128, 256, 512)}
        ways |= {way: tiles.product(weight) for way, tiles in OURS.items()}
        rows, whole = rows_of(MOST, weight.shape[1]), {}
        for way, run in ways.items():

            def compared(way: str = way, run: Way = run) -> str:
                whole[way] = run(rows)
                different = torch.zeros(len(counts), dtype=torch.int64, device=rows.device)
                for index, count in enumerate(counts):
                    offset = (index * 389) % (MOST - count + 1)
                    part = run(rows[offset : offset + count])
                    different[index] = (part != whole[way][offset : offset + count]).any(1).sum()
                found = {count: number for count, number in zip(counts, different.tolist(), strict=True) if number}
                total = sum(found.values())
                return f"{total} of {sum(counts)} rows {ranges(sorted(found), counts)}"

            print(f"{name:8s}{way:22s} {attempt(way, compared)}", flush=True)
        equal = [f"{way} {(whole['unsplit'] != out).any(1).sum().item()}" for way, out in whole.items()]
        print(f"{name:8s}rows of 8192 that differ from unsplit: {', '.join(equal)}", flush=True)


def ranges(found: list[int], counts: list[int]) -> str:
    """Write the numbers found as ranges of those that were tried."""
    tried, text = sorted(set(counts)), []
    for count in found:
        place = tried.index(count)
        if text and text[-1][1] == place - 1:
            text[-1][1] = place
        else:
            text.append([place, place])
    return "[" + ", ".join(str(tried[a]) if a == b else f"{tried[a]}..{tried[b]}" for a, b in text) + "]"


def kernels(weights: dict[str, torch.Tensor], rows_of: Callable[[int, int], torch.Tensor]) -> None:
    """Print the library's kernels, by the numbers of rows that take them."""
    counts = (1, 8, 17, 37, 64, 100, 128, 200, 256, 475, 512, 1024, 2048, 4096, 8192)
    print("\nkernels")
    for name, weight in weights.items():
        for way, run in {"library": by_library(weight), "unsplit": by_unsplit(weight)}.items():
            taken: defaultdict[str, list[int]] = defaultdict(list)
            for count in counts:
                rows = rows_of(count, weight.shape[1])
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                    run(rows)
                    torch.cuda.synchronize()
                taken[" + ".join(Counter(event.key for event in profile.key_averages()))].append(count)
            for kernel, sizes in taken.items():
                print(f"{name:8s}{way:10s}{sizes} {kernel[:200]}", flush=True)


def experts(device: torch.device) -> None:
    """Print the time of a layer's experts, in every way, from the choice on, and whether rows keep their bits."""
    options = {"device": device, "dtype": torch.bfloat16}
    gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, **options) / HIDDEN**0.5
    down = torch.randn(EXPERTS, HIDDEN, INNER, **options) / INNER**0.5
    library = SortedExperts(gate_up, down)

    def today(rows: torch.Tensor, routing: Routing) -> torch.Tensor:
        out = torch.empty_like(rows)
        routed_experts(out, rows, gate_up, down, routing.expert_ids, routing.weights, "silu")
        return out

    ways = {
        "library, sorted": library,
        "kernels of few rows": today,
        "ours 128": Tiles(128, 128).experts(gate_up, down, Tiles(128, 256)),
        "ours 64": Tiles(64, 128, num_warps=4, num_stages=4).experts(
            gate_up, down, Tiles(64, 256, num_warps=4, num_stages=4)
        ),
        "ours 32": Tiles(32, 64, 128, num_warps=4).experts(gate_up, down, Tiles(32, 128, 128, num_warps=4)),
        "ours 16": Tiles(16, 64, 128, num_warps=4).experts(gate_up, down, Tiles(16, 128, 128, num_warps=4)),
    }
    cases = {}
    for num_pairs in PAIRS:
        rows = torch.randn(num_pairs // CHOSEN, HIDDEN, **options)
        scores = torch.randn(num_pairs // CHOSEN, EXPERTS, device=device)
        weights, ids = scores.topk(CHOSEN)
        cases[num_pairs] = rows, Routing(ids.contiguous(), weights.softmax(-1).contiguous())
    print(f"\n{'experts, us (TFLOP/s)':26s}" + "".join(f"{pairs:>14d}" for pairs in PAIRS))
    bytes_read = (gate_up.nbytes + down.nbytes) / 4.2e6
    print(f"{'floor':26s}" + "".join(f"{max(bytes_read, pairs * 6 * HIDDEN * INNER / 7e8):>14.0f}" for pairs in PAIRS))
    parts = {
        "torch's sort alone": lambda rows, routing: routing.expert_ids.flatten().sort(stable=True),
        "our sort alone": lambda rows, routing: sorted_pairs(routing, EXPERTS),
        "both grouped_mm alone": grouped_alone(gate_up, down),
    }
    outputs = {}
    for way, run in {**parts, **ways}.items():
        line = [f"{way:26s}"]
        for num_pairs, case in cases.items():
            if way == "kernels of few rows" and num_pairs > 4096:
                break

            def timed(run: Callable[..., torch.Tensor] = run, case: tuple = case, pairs: int = num_pairs) -> str:
                time = microseconds(lambda: run(*case))
                return f"{time:.0f} ({pairs * 6 * HIDDEN * INNER / time / 1e6:.0f})"

            line.append(f"{attempt(way, timed):>14s}")
            if line[-1].strip() == "-":
                break
        print("".join(line), flush=True)
        if way in ways:
            attempt(way, lambda run=run, way=way: keep(outputs, way, run, cases[4096]))
    expected = outputs["library, sorted"].float()
    for way, out in outputs.items():
        error = ((out.float() - expected).norm() / expected.norm()).item()
        rows, routing = cases[4096]
        different = 0
        for count in (1, 17, 37, 100, 255, 256, 300, 475):
            part = Routing(*(field[30 : 30 + count].contiguous() for field in (routing.expert_ids, routing.weights)))
            different += (ways[way](rows[30 : 30 + count], part) != out[30 : 30 + count]).any(1).sum().item()
        print(f"  {way}: {error:.1e} from the library's; {different} of 1441 rows differ from those among 512")


def keep(outputs: dict[str, torch.Tensor], way: str, run: Callable[..., torch.Tensor], case: tuple) -> str:
    outputs[way] = run(*case)
    return ""


def grouped_alone(gate_up: torch.Tensor, down: torch.Tensor) -> Callable[..., torch.Tensor]:
    def run(rows: torch.Tensor, routing: Routing) -> torch.Tensor:
        num_pairs = routing.expert_ids.numel()
        ends = torch.arange(1, EXPERTS + 1, device=rows.device, dtype=torch.int32) * (num_pairs // EXPERTS)
        wide, narrow = rows.new_empty(num_pairs, HIDDEN), rows.new_empty(num_pairs, INNER)
        F.grouped_mm(wide, gate_up.transpose(1, 2), offs=ends)
        return F.grouped_mm(narrow, down.transpose(1, 2), offs=ends)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="dense,bits,kernels,experts")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("what is timed here runs on a GPU, and torch sees none")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, bfloat16")
    device = torch.device("cuda")
    with torch.inference_mode():
        weights = {
            name: torch.randn(shape, device=device, dtype=torch.bfloat16) / shape[1] ** 0.5
            for name, shape in SHAPES.items()
        }
        rows = {width: torch.randn(MOST, width, device=device, dtype=torch.bfloat16) for width in (4096, 14336)}
        for name, part in {"dense": dense, "bits": bits, "kernels": kernels}.items():
            if name in options.only.split(","):
                attempt(name, lambda part=part: part(weights, lambda count, width: rows[width][:count]) or "")
        if "experts" in options.only.split(","):
            attempt("experts", lambda: experts(device) or "")


if __name__ == "__main__":
    main()
