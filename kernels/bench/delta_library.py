"""Times the gated delta rule and compares it with flash-linear-attention, which must be importable.

    PYTHONPATH=.:kernels:FOLDER python kernels/bench/delta_library.py [--batch 1 16 64] [--rows 1 4] [--prompts 512]

FOLDER holds the packages `fla` and `einops` from the wheels of fla-core and einops, which are plain Python. The sizes
are those of one layer of Qwen3.5-9B. The library's recurrence returns the state after the last row. In verify this
project's returns a state after each row. Both have a chunked form for prompts. The library's queries, keys and
values are bf16, and the states of both are float32. The printed difference is the largest one of outputs and last
states, divided by the largest value.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from attention import BANDWIDTH, L2_BYTES, LAUNCHES, microseconds
from delta_net import Net, random_rows
from figures import require_gpu

from spec_kernels import delta_rule
from spec_kernels.delta_chunks import delta_chunks

Library = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def compare(
    library: Library, net: Net, batch: int, num_rows: int, is_prompt: bool
) -> tuple[float, float | None, float, float]:
    """Return the microseconds of our recurrence row by row, of our chunked form (None for verify), and of the library,
    and the largest difference between the library's results and ours."""
    rows = random_rows(net, batch, num_rows)
    rows_kept = 1 if is_prompt else num_rows
    copies = min(LAUNCHES, 1 + int(2 * L2_BYTES / (batch * rows_kept * net.state_bytes)))
    heads = (net.num_value_heads, net.head_dim, net.head_dim)
    states = torch.zeros(copies, batch + 1, rows_kept, *heads, device="cuda")
    begun = torch.zeros(copies, batch, *heads, device="cuda")
    out = torch.empty(batch, num_rows, *heads[:2], device="cuda")
    slots, first = torch.arange(batch, device="cuda"), torch.zeros(batch, dtype=torch.int64, device="cuda")

    def kernel(index: int) -> None:
        delta_rule.delta_rule(out, states[index % copies], *rows, slots, first, net.num_key_heads, is_prompt)

    def chunks(index: int) -> None:
        delta_chunks(out, states[index % copies], *rows, slots, first, net.num_key_heads)

    given = library_rows(net, *rows)

    def of_library(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return library(**given, scale=1.0, initial_state=begun[index % copies], output_final_state=True)

    chunks(0) if is_prompt else kernel(0)
    apart = max(farthest(*pair) for pair in zip(of_library(0), (out, states[0, :batch, -1]), strict=True))
    in_chunks = microseconds(chunks) if is_prompt else None
    return microseconds(kernel), in_chunks, microseconds(of_library), apart


def library_rows(net: Net, mixed: torch.Tensor, log_decay: torch.Tensor, strength: torch.Tensor) -> dict[str, Any]:
    """Return by the library's argument names rows [batch, rows, heads, head_dim] and gates [batch, rows, heads]."""
    key_size = net.num_key_heads * net.head_dim
    parts = mixed.split([key_size, key_size, net.num_value_heads * net.head_dim], dim=-1)
    queries, keys, values = (part.unflatten(-1, (-1, net.head_dim)).bfloat16().contiguous() for part in parts)
    return {"q": queries, "k": keys, "v": values, "g": log_decay.contiguous(), "beta": strength.contiguous()}


def farthest(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).abs().max() / expected.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 4096], help="rows of one prompt's chunk")
    options = parser.parse_args()
    require_gpu()
    from fla import __version__
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, fla-core {__version__}")
    print("batch  rows  what     kernel us  in chunks  library us   apart   floor us")
    net = Net()
    shapes = [(batch, num_rows, False) for batch in options.batch for num_rows in options.rows]
    with torch.no_grad():
        for batch, num_rows, is_prompt in (*shapes, *((1, num_rows, True) for num_rows in options.prompts)):
            library = chunk_gated_delta_rule if is_prompt else fused_recurrent_gated_delta_rule
            ours, in_chunks, theirs, apart = compare(library, net, batch, num_rows, is_prompt)
            floor_us = batch * (1 + (1 if is_prompt else num_rows)) * net.state_bytes / BANDWIDTH * 1e6
            what = "prompt" if is_prompt else "verify"
            chunks = "-" if in_chunks is None else f"{in_chunks:.1f}"
            times = f"{ours:11.1f}{chunks:>11}{theirs:12.1f}"
            print(f"{batch:5}{num_rows:6}  {what:7}{times}{apart:8.0e}{floor_us:11.1f}", flush=True)


if __name__ == "__main__":
    main()
