"""Times attention of prompt chunks on a GPU, and compares it with the bound of its arithmetic and with SDPA.

    PYTHONPATH=.:kernels python kernels/bench/prompt_attention.py [--keys 2048 8192 32768 122880] [--rows 2048]

Lower bound: without a window, `rows` query rows against all keys before them need
`4 * rows * (keys - rows / 2) * num_heads * head_dim` operations. The bound is their number divided by the rate of the
tensor cores. An H200 multiplies large bf16 matrices at about 790 TFLOP/s. The keys are read once for each tile of rows,
mostly from L2. SDPA gets keys and values in consecutive slots, so its time does not include gathering them from pages.
It is timed without a window, for heads of up to 256 channels.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from figures import require_gpu
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from spec_kernels.attention import paged_attention
from spec_kernels.attention_tiles import choose_split_keys

RATE = 790e12
REPEATS = 7


def microseconds(launch: Callable[..., object], *arguments: object) -> float:
    """Return the median time of a launch."""
    launch(*arguments)
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        launch(*arguments)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[REPEATS // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, nargs="+", default=[2048, 8192, 32_768, 122_880])
    for name, default in (("rows", 2048), ("num-heads", 32), ("num-kv-heads", 8), ("head-dim", 128), ("page-size", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--window", type=int)
    options = parser.parse_args()
    require_gpu()
    rows, page_size, window = options.rows, options.page_size, options.window
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, medians of {REPEATS}")
    print("  keys  rows   kernel us    sdpa us   floor us   of floor")
    for keys in options.keys:
        queries = torch.randn(rows, options.num_heads, options.head_dim, device="cuda", dtype=torch.bfloat16)
        columns = -(-keys // page_size)
        pages = torch.randperm(columns, device="cuda").unsqueeze(0) + 2
        page_table = torch.cat((pages, torch.ones_like(pages[:, :1])), dim=1)
        cells = ((columns + 2) * page_size, 2, options.num_kv_heads, options.head_dim)
        kv = torch.randn(cells, device="cuda", dtype=torch.bfloat16)
        out = queries.new_empty(rows, options.num_heads * options.head_dim)
        kernel = microseconds(
            paged_attention,
            out,
            queries,
            kv,
            page_table,
            torch.full((1,), keys, device="cuda"),
            page_size,
            keys,
            choose_split_keys(keys),
            options.head_dim**-0.5,
            window,
        )
        sdpa = sdpa_time(queries, kv[:keys]) if window is None and options.head_dim <= 256 else float("nan")
        seen = keys - (rows - 1) / 2 if window is None else min(window, keys)
        floor = 4 * rows * seen * options.num_heads * options.head_dim / RATE * 1e6
        print(f"{keys:6}{rows:6}{kernel:12.1f}{sdpa:11.1f}{floor:11.1f}{floor / kernel:11.0%}")


def sdpa_time(queries: torch.Tensor, kv: torch.Tensor) -> float:
    """Time SDPA's flash kernel over keys and values in consecutive slots."""
    heads = [rows.transpose(0, 1).unsqueeze(0) for rows in (queries, kv[:, 0], kv[:, 1])]
    causal = causal_lower_right(heads[0].shape[2], heads[1].shape[2])

    def launch() -> torch.Tensor:
        return F.scaled_dot_product_attention(*heads, attn_mask=causal, enable_gqa=True)

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return microseconds(launch)


if __name__ == "__main__":
    main()
