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
from attention import BANDWIDTH, microseconds, num_copies
from delta_net import GPU, NET, STATE_BYTES
from figures import require_gpu

from spec_kernels.delta_chunks import delta_chunks
from spec_kernels.delta_rule import delta_rule

Library = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def random_rows(batch: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make the inputs of the delta rule, with queries and keys of unit length."""
    heads = torch.randn(batch, num_rows, 2 * NET.num_key_heads, NET.key_head_dim, device=GPU)
    unit = torch.nn.functional.normalize(heads, dim=-1).flatten(2)
    values = torch.randn(batch, num_rows, NET.value_size, device=GPU)
    log_decay, strength = torch.rand(2, batch, num_rows, NET.num_value_heads, device=GPU)
    return torch.cat((unit, values), dim=-1), -log_decay, strength


def compare(library: Library, batch: int, num_rows: int, is_prompt: bool) -> tuple[float, float | None, float, float]:
    """Return the microseconds of our recurrence row by row, of our chunked form (None for verify), and of the library,
    and the largest difference between the library's results and ours."""
    rows, rows_kept = random_rows(batch, num_rows), 1 if is_prompt else num_rows
    copies = num_copies(batch * rows_kept * STATE_BYTES)
    states = torch.zeros(copies, batch + 1, rows_kept, *NET.state_shape, device=GPU)
    begun = torch.zeros(copies, batch, *NET.state_shape, device=GPU)
    places = torch.arange(batch, device=GPU), torch.zeros(batch, dtype=torch.int64, device=GPU)

    def kernel(index: int) -> torch.Tensor:
        return delta_rule(states[index % copies], *rows, *places, NET.num_key_heads, is_prompt)

    def chunks(index: int) -> torch.Tensor:
        return delta_chunks(states[index % copies], *rows, *places, NET.num_key_heads)

    given = library_rows(*rows)

    def of_library(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return library(**given, scale=1.0, initial_state=begun[index % copies], output_final_state=True)

    out = chunks(0) if is_prompt else kernel(0)
    apart = max(farthest(*pair) for pair in zip(of_library(0), (out, states[0, :batch, -1]), strict=True))
    in_chunks = microseconds(chunks) if is_prompt else None
    return microseconds(kernel), in_chunks, microseconds(of_library), apart


def library_rows(mixed: torch.Tensor, log_decay: torch.Tensor, strength: torch.Tensor) -> dict[str, Any]:
    """Return by the library's argument names rows [batch, rows, heads, head_dim] and gates [batch, rows, heads]."""
    parts = mixed.split([NET.key_size, NET.key_size, NET.value_size], dim=-1)
    queries, keys, values = (part.unflatten(-1, (-1, NET.key_head_dim)).bfloat16().contiguous() for part in parts)
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
    shapes = [(batch, num_rows, False) for batch in options.batch for num_rows in options.rows]
    with torch.no_grad():
        for batch, num_rows, is_prompt in (*shapes, *((1, num_rows, True) for num_rows in options.prompts)):
            library = chunk_gated_delta_rule if is_prompt else fused_recurrent_gated_delta_rule
            ours, in_chunks, theirs, apart = compare(library, batch, num_rows, is_prompt)
            floor_us = batch * (1 + (1 if is_prompt else num_rows)) * STATE_BYTES / BANDWIDTH * 1e6
            what = "prompt" if is_prompt else "verify"
            chunks = "-" if in_chunks is None else f"{in_chunks:.1f}"
            times = f"{ours:11.1f}{chunks:>11}{theirs:12.1f}"
            print(f"{batch:5}{num_rows:6}  {what:7}{times}{apart:8.0e}{floor_us:11.1f}", flush=True)


if __name__ == "__main__":
    main()
