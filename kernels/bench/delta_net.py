"""Times the steps of a gated delta net on a GPU; compares them with the bytes that have to move, and with torch.

    PYTHONPATH=.:kernels python kernels/bench/delta_net.py [--batch 1 16 64] [--rows 4] [--prompts 512]

Lower bound: a state has `num_value_heads * key_head_dim * value_head_dim` floats, 2.1 MB in Qwen3.5-9B. For each
request, verify of N rows reads one state and writes N, and replay reads and writes one. With many requests this bounds
the time, rather than the arithmetic (7 operations for each element of the state and each row). The states of one
request take 2.5 us in verify of 4 rows. To come near it, many programs must load at the same time, and launches must
be few. Rows of a prompt are run in chunks from 64 rows on, and fewer one after the other, with the state in registers.
There the bound is the latency of one row times the number of rows.

Times are for one call inside a CUDA graph of many. The rule and the replay cycle through states that together exceed
L2. The other steps find their inputs in L2 if they fit.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from acceptance import Call
from attention import BANDWIDTH, REPEATS, microseconds, num_copies
from figures import Figure, options_of, write_figures

from spec_lab.checkpoints.plan import DeltaNetSizes
from spec_lab.core.recurrent_cache import ConvWindows, RecurrentRows
from spec_lab.models.delta_caches import StateCheckpoints
from spec_lab.models.delta_steps import DeltaNetWeights, TorchDeltaSteps
from spec_lab.operators.triton_delta import TritonDeltaSteps, TritonReplayedUpdates, TritonStateCheckpoints

NET = DeltaNetSizes(num_key_heads=16, num_value_heads=32, key_head_dim=128, value_head_dim=128, kernel_size=4)
"""A layer of Qwen3.5-9B, or of 35B-A3B."""
STATE_BYTES = 4 * prod(NET.state_shape)  # float32
BF16, GPU = torch.bfloat16, torch.device("cuda")


@dataclass(frozen=True)
class Case:
    """One measurement: its name, the bytes that have to move, the kernel, and its torch form, if it is timed."""

    name: str
    num_bytes: int
    kernel: Call
    torch_form: Call | None = None


def random_weights() -> DeltaNetWeights:
    heads = NET.num_value_heads
    conv_weight, gates = torch.randn(NET.conv_size, NET.kernel_size, device=GPU), torch.rand(2, heads, device=GPU)
    return DeltaNetWeights(NET, conv_weight, *gates, torch.ones(NET.value_head_dim, device=GPU, dtype=BF16), 1e-6)


def cases(batch: int, num_rows: int, is_prompt: bool) -> Iterator[Case]:
    """Yield the measured steps of a layer, for verify or for a prompt."""
    ours, plain = TritonDeltaSteps(random_weights()), TorchDeltaSteps(random_weights())
    accepted = 0 if is_prompt else (num_rows - 1) // 2
    slots = RecurrentRows(torch.arange(batch, device=GPU), torch.full((batch,), accepted, device=GPU), is_prompt)
    projected = torch.randn(batch, num_rows, sum(NET.projected_sizes), device=GPU, dtype=BF16)
    rows_kept = 1 if is_prompt else num_rows
    windows = ConvWindows.zeros(batch, NET.history + rows_kept - 1, NET.conv_size, BF16, GPU)
    per_row = (2 + 4) * (NET.conv_size + 2 * NET.num_value_heads)  # read in 16 bits, written in float32; not the gate
    moved = batch * num_rows * per_row + batch * (2 * NET.history + rows_kept - 1) * NET.conv_size * 2
    given = projected, windows, slots
    yield Case("inputs", moved, lambda index: ours.inputs(*given), lambda index: plain.inputs(*given))

    rows, plain_rows = ours.inputs(*given), plain.inputs(*given)
    num_bytes = batch * (1 + rows_kept) * STATE_BYTES
    checkpoints, references = (
        [kind(NET, batch, rows_kept, BF16, GPU) for _ in range(num_copies(num_bytes))]
        for kind in (TritonStateCheckpoints, StateCheckpoints)
    )
    moved = num_bytes + batch * num_rows * 4 * (NET.conv_size + 2 * NET.num_value_heads)
    if is_prompt:
        yield Case("rule", moved, lambda index: checkpoints[index % len(checkpoints)].prompt(rows, slots))
    else:
        yield Case(
            "rule",
            moved,
            lambda index: checkpoints[index % len(checkpoints)].verify(rows, slots),
            lambda index: references[index % len(references)].verify(plain_rows, slots),
        )
        num_bytes = batch * 2 * STATE_BYTES
        replays = [TritonReplayedUpdates(NET, batch, num_rows, BF16, GPU) for _ in range(num_copies(num_bytes))]
        yield Case("replay", num_bytes, lambda index: replays[index % len(replays)].verify(rows, slots))

    outputs = torch.randn(batch * num_rows, NET.num_value_heads, NET.value_head_dim, device=GPU)
    gate = projected[..., NET.conv_size : NET.conv_size + NET.value_size].reshape(outputs.shape)
    moved = batch * num_rows * NET.value_size * 8
    yield Case("gated norm", moved, lambda index: ours.gated(outputs, gate), lambda index: plain.gated(outputs, gate))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rows", type=int, nargs="+", default=[4])
    parser.add_argument("--prompts", type=int, nargs="+", default=[512], help="rows of one prompt's chunk")
    options = options_of(parser)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, medians of {REPEATS} replays")
    print("batch  rows  what          kernel us   torch us   floor us")
    figures = []
    shapes = [(batch, rows, False) for batch in options.batch for rows in options.rows]
    for batch, num_rows, is_prompt in (*shapes, *((1, rows, True) for rows in options.prompts)):
        for case in cases(batch, num_rows, is_prompt):
            kernel_us = microseconds(case.kernel)
            torch_us = float("nan") if case.torch_form is None else microseconds(case.torch_form)
            times = f"{kernel_us:12.2f}{torch_us:11.2f}{case.num_bytes / BANDWIDTH * 1e6:11.2f}"
            print(f"{batch:5}{num_rows:6}  {case.name:12}{times}", flush=True)
            what = f"batch {batch}, {num_rows} rows{' of a prompt' if is_prompt else ''}"
            figures.append(Figure(f"delta net, {case.name}", what, case.num_bytes, None, kernel_us, torch_us))
    write_figures(options.csv, figures)


if __name__ == "__main__":
    main()
