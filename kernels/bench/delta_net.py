"""Times the kernels of a gated delta net on a GPU; compares them with the bytes that have to move, and with torch.

In 16 bits, prompts of 64 rows or more run in chunks instead, by a kernel that `delta_library.py` times.

    PYTHONPATH=.:kernels python kernels/bench/delta_net.py [--batch 1 16 64] [--rows 4] [--prompts 512] [--tiles 16:1]

Lower bound: a state has `num_value_heads * key_head_dim * value_head_dim` floats, 2.1 MB in Qwen3.5-9B. For each
request, verify of N rows reads one state and writes N, and replay reads and writes one. With many requests this bounds
the time, rather than the arithmetic (7 operations for each element of the state and each row). The states of one
request take 2.5 us in verify of 4 rows. To come near it, many programs must load at the same time, and launches must
be few. `delta_rule` computes the rows of a prompt one after the other, with the state in registers. There the bound is
the latency of one row times the number of rows.

Times are for one call inside a CUDA graph of many. The rule and the replay cycle through states that together exceed
L2. The other steps find their inputs in L2 if they fit.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from acceptance import Call
from attention import BANDWIDTH, L2_BYTES, LAUNCHES, REPEATS, microseconds
from figures import Figure, options_of, write_figures

from spec_kernels import delta_inputs, delta_kept, delta_reference, delta_rule, gated_norm


@dataclass(frozen=True)
class Net:
    """Sizes, by default Qwen3.5-9B's and 35B-A3B's."""

    num_key_heads: int = 16
    num_value_heads: int = 32
    head_dim: int = 128
    history: int = 3

    @property
    def conv_size(self) -> int:
        return (2 * self.num_key_heads + self.num_value_heads) * self.head_dim

    @property
    def state_bytes(self) -> int:
        return self.num_value_heads * self.head_dim**2 * 4


@dataclass(frozen=True)
class Case:
    """One measurement: its name, the bytes that have to move, the kernel, and its reference, if it is timed."""

    name: str
    num_bytes: int
    kernel: Call
    reference: Call | None


def random_rows(net: Net, batch: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make the inputs of the delta rule, with queries and keys of unit length."""
    heads = torch.randn(batch, num_rows, 2 * net.num_key_heads, net.head_dim, device="cuda")
    unit = torch.nn.functional.normalize(heads, dim=-1).flatten(2)
    values = torch.randn(batch, num_rows, net.num_value_heads * net.head_dim, device="cuda")
    gates = torch.rand(2, batch, num_rows, net.num_value_heads, device="cuda")
    return torch.cat((unit, values), dim=-1), -gates[0], gates[1]


def num_copies(num_bytes: int) -> int:
    """Return how many copies of so many bytes to cycle through: enough to exceed L2 twice, but at most LAUNCHES."""
    return min(LAUNCHES, 1 + int(2 * L2_BYTES / num_bytes))


def cases(net: Net, batch: int, num_rows: int, is_prompt: bool) -> Iterator[Case]:
    """Yield the measured steps of a layer, for verify or for a prompt."""
    rows = random_rows(net, batch, num_rows)
    slots, begin = torch.arange(batch, device="cuda"), torch.zeros(batch, dtype=torch.int64, device="cuda")
    out = torch.empty(batch, num_rows, net.num_value_heads, net.head_dim, device="cuda")
    rows_kept = 1 if is_prompt else num_rows
    copies = num_copies(batch * rows_kept * net.state_bytes)
    shape = (copies, batch + 1, rows_kept, net.num_value_heads, net.head_dim, net.head_dim)
    states = torch.zeros(shape, device="cuda")
    given = (*rows, slots, begin, net.num_key_heads, is_prompt)

    yield from input_cases(net, batch, num_rows, is_prompt)
    moved = batch * ((1 + rows_kept) * net.state_bytes + num_rows * 4 * (net.conv_size + 2 * net.num_value_heads))
    yield Case(
        "rule",
        moved,
        lambda index: delta_rule.delta_rule(out, states[index % copies], *given),
        None if is_prompt else lambda index: delta_reference.delta_rule_reference(out, states[index % copies], *given),
    )
    if is_prompt:
        return
    kept = (
        torch.zeros(batch + 1, num_rows, net.num_key_heads, net.head_dim, device="cuda"),
        torch.zeros(batch + 1, num_rows, net.num_value_heads, net.head_dim, device="cuda"),
        *torch.zeros(2, batch + 1, num_rows, net.num_value_heads, device="cuda"),
    )

    copies_of_one = num_copies(batch * net.state_bytes)
    one_state = torch.zeros((copies_of_one, batch + 1, *shape[3:]), device="cuda")
    last = begin + (num_rows + 1) // 2 - 1

    def replay_and_keep(index: int) -> None:
        delta_rule.delta_replay(out, one_state[index % copies_of_one], *rows, slots, last, *kept)
        delta_kept.keep_delta_rows(*kept, *rows, slots)

    yield Case("replay", batch * 2 * net.state_bytes, replay_and_keep, None)


def input_cases(net: Net, batch: int, num_rows: int, is_prompt: bool) -> Iterator[Case]:
    """Yield the steps before and after the delta rule."""
    value_size = net.num_value_heads * net.head_dim
    width = net.conv_size + value_size + 2 * net.num_value_heads
    projected = torch.randn(batch, num_rows, width, device="cuda", dtype=torch.bfloat16)
    columns = net.history + (1 if is_prompt else num_rows) - 1
    windows = torch.zeros(batch + 1, columns, net.conv_size, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(net.conv_size, net.history + 1, device="cuda")
    gates = torch.rand(2, net.num_value_heads, device="cuda")
    slots, begin = torch.arange(batch, device="cuda"), torch.zeros(batch, dtype=torch.int64, device="cuda")
    mixed = torch.empty(batch, num_rows, net.conv_size, device="cuda")
    floats = torch.empty(2, batch, num_rows, net.num_value_heads, device="cuda")
    given = (
        mixed,
        *floats,
        windows,
        projected,
        weight,
        *gates,
        slots,
        begin,
        net.num_key_heads,
        net.head_dim,
        is_prompt,
    )
    per_row = (2 + 4) * (net.conv_size + 2 * net.num_value_heads)  # read in 16 bits, written in float32; not the gate
    moved = batch * num_rows * per_row + batch * (net.history + columns) * net.conv_size * 2
    yield Case(
        "inputs",
        moved,
        lambda index: delta_inputs.delta_inputs(*given),
        lambda index: delta_inputs.delta_inputs_reference(*given),
    )
    outputs = torch.randn(batch * num_rows, net.num_value_heads, net.head_dim, device="cuda")
    gate = projected[..., net.conv_size : net.conv_size + value_size].reshape(outputs.shape)
    norm_weight = torch.ones(net.head_dim, device="cuda", dtype=torch.bfloat16)
    normed = torch.empty_like(outputs, dtype=torch.bfloat16)
    yield Case(
        "gated norm",
        batch * num_rows * value_size * 8,
        lambda index: gated_norm.gated_norm(normed, outputs, gate, norm_weight, 1e-6),
        lambda index: gated_norm.gated_norm_reference(normed, outputs, gate, norm_weight, 1e-6),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rows", type=int, nargs="+", default=[4])
    parser.add_argument("--prompts", type=int, nargs="+", default=[512], help="rows of one prompt's chunk")
    parser.add_argument("--tiles", nargs="+", default=[""], help="VALUE_TILE:NUM_WARPS of rule and replay, in turn")
    options = options_of(parser)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, medians of {REPEATS} replays")
    print("tile   batch  rows  what          kernel us   torch us   floor us")
    net, figures = Net(), []
    shapes = [(batch, rows, False) for batch in options.batch for rows in options.rows]
    for tile in options.tiles:
        if tile:
            delta_rule.VALUE_TILE, delta_rule.NUM_WARPS = map(int, tile.split(":"))
        for batch, num_rows, is_prompt in (*shapes, *((1, rows, True) for rows in options.prompts)):
            for case in cases(net, batch, num_rows, is_prompt):
                if tile and case.name not in ("rule", "replay"):
                    continue
                kernel_us = microseconds(case.kernel)
                reference_us = float("nan") if tile or case.reference is None else microseconds(case.reference)
                times = f"{kernel_us:12.2f}{reference_us:11.2f}{case.num_bytes / BANDWIDTH * 1e6:11.2f}"
                print(f"{tile or '-':5}{batch:7}{num_rows:6}  {case.name:12}{times}", flush=True)
                what = f"batch {batch}, {num_rows} rows{' of a prompt' if is_prompt else ''}"
                name = f"delta net, {case.name}"
                figures.append(Figure(name, what, case.num_bytes, None, kernel_us, reference_us))
    write_figures(options.csv, figures)


if __name__ == "__main__":
    main()
